"""Change one sign, factor, index or term of the source at a time, and check that a test fails.

    python tests/mutations.py --jobs 16 --write

Every mutation is applied to a copy of the source, and the default tests of its package run on the
copy. A mutation with which all tests pass survives, and the exit status is 1. A mutation is named
by a line of its package, so that it outlives a move of the line to another file; a line that no
longer occurs exactly once is an error that names it. ``--write`` updates the rows of the mutations
that were run in ``tests/mutations.md``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "experiments")

# The tests of each package of src/bayou, those that fail soonest first.
TESTS = {
    "kernels": (
        "tests/kernels",
        "tests/methods/test_annealed.py",
        "tests/methods/test_hmc.py",
        "tests/methods",
        "tests/proofs",
    ),
    "curvature": (
        "tests/curvature",
        "tests/operations/test_joint_prior.py",
        "tests/proofs",
        "tests/methods",
    ),
    "guides": ("tests/conformance/test_guides.py", "tests/guides"),
    "flows/layers": ("tests/conformance/test_flows.py", "tests/flows"),
    "likelihoods": (
        "tests/test_likelihoods.py",
        "tests/curvature/test_information.py",
        "tests/test_predictive.py",
        "tests/test_metrics.py",
        "tests/test_sequences.py",
        "tests/methods/test_laplace.py",
    ),
}
TABLE = ROOT / "tests/mutations.md"
HEADER = "| file | line | changed to | killed by | seconds |\n|---|---|---|---|---|\n"


class Mutation(NamedTuple):
    """A line of a package, and what replaces a part of it."""

    package: str
    old: str
    new: str


class Outcome(NamedTuple):
    """The first test that failed with a mutation, or why there is none."""

    killed_by: str | None
    problem: str
    seconds: float


MUTATIONS = [
    # kernels
    Mutation("kernels", "half = 0.5 * step_size", "half = step_size"),
    Mutation("kernels", "noise * inverse_mass.rsqrt()", "noise * inverse_mass.sqrt()"),
    Mutation("kernels", "(0.5 * twice - point.log_prob)", "(0.5 * twice + point.log_prob)"),
    Mutation("kernels", "fall.clamp(max=0).exp()", "fall.clamp(max=0).mul(0.5).exp()"),
    Mutation(
        "kernels",
        "state.position + 0.5 * lr * gradient + square_root(lr * temperature) * noise",
        "state.position + lr * gradient + square_root(lr * temperature) * noise",
    ),
    Mutation("kernels", "(1 - friction) * state.velocity", "(1 + friction) * state.velocity"),
    Mutation(
        "kernels", "square_root(friction * lr * temperature)", "square_root(lr * temperature)"
    ),
    Mutation("kernels", "(1 - decay**steps)", "(1 - decay)"),
    Mutation(
        "kernels",
        "accept = fall.clamp",
        "accept = (-fall).clamp",
    ),
    Mutation("kernels", "tree.log_weight - log_weight)", "tree.log_weight)"),
    Mutation("kernels", "middle = (a + b) // 2", "middle = (a + b) // 2 - 1"),
    Mutation("kernels", "2 * z * velocity + e *", "2 * z * velocity - e *"),
    Mutation("kernels", "kinetic + gain + state.log_prob - log_prob", "kinetic + gain"),
    Mutation("kernels", "eta * (target - accept", "eta * (accept - target"),
    Mutation("kernels", "variance * (n / (n + 5))", "variance * ((n + 5) / n)"),
    Mutation("kernels", "(beta - before) * log_ratio.double()", "beta * log_ratio.double()"),
    Mutation("kernels", "- math.log(count),", ","),
    # curvature
    Mutation("curvature", "self.log_det + self.size * LOG_2PI", "self.log_det + LOG_2PI"),
    Mutation("curvature", "2 * std.log().sum()", "std.log().sum()"),
    Mutation("curvature", "return inverse.mT @ inverse", "return inverse @ inverse.mT"),
    Mutation("curvature", "d.square().sum(-1) - inner", "d.square().sum(-1) + inner"),
    Mutation("curvature", "eye + scaled @ scaled.mT", "eye - scaled @ scaled.mT"),
    Mutation("curvature", "- 0.5 * self.count * noise.log()", "- self.count * noise.log()"),
    Mutation(
        "curvature", "precision * d.double().square() - LOG_2PI", "precision * d.double().square()"
    ),
    Mutation("curvature", "- 2 * basis.t.numel() * basis.root", "- basis.t.numel() * basis.root"),
    Mutation("curvature", "g_squared.mT @ a_squared", "g_squared.abs().sqrt().mT @ a_squared"),
    Mutation("curvature", "sign * first, sign * second", "first, second"),
    # guides
    Mutation(
        "guides", "2 * self.log_std.sum() + torch.logdet", "self.log_std.sum() + torch.logdet"
    ),
    Mutation("guides", "- self.prior.log_prob(sampled)", "+ self.prior.log_prob(sampled)"),
    Mutation("guides", "self.base.log_prob(z0) - ladj", "self.base.log_prob(z0) + ladj"),
    Mutation(
        "guides",
        "log_q = self.base.log_prob(eps) - ladj - self.log_std.sum()",
        "log_q = self.base.log_prob(eps) - ladj + self.log_std.sum()",
    ),
    Mutation("guides", "0.5 * (LOG_2PI - precision.log() + square)", "0.5 * (LOG_2PI + square)"),
    Mutation("guides", "(self.c.square() @ std.square()).sqrt()", "(self.c @ std.square()).sqrt()"),
    Mutation(
        "guides",
        "0.5 * z.square() @ quadratic - z @ linear",
        "0.5 * z.square() @ quadratic + z @ linear",
    ),
    Mutation(
        "guides",
        "F.softplus(self.logit_p) - (1 - keep_probability)",
        "F.softplus(self.logit_p) - keep_probability",
    ),
    Mutation("guides", "log_sum - math.log(self.draws + 1)", "log_sum - math.log(self.draws)"),
    Mutation("guides", "- 0.5 * (step @ gram * step).sum(-1)", "- (step @ gram * step).sum(-1)"),
    Mutation("guides", "distance - 1 - ratio.log()", "distance - 1 + ratio.log()"),
    Mutation("guides", "+ outputs * self.log_det", "- outputs * self.log_det"),
    Mutation("guides", "0.5 * (log_b - log_a) - log_std", "0.5 * (log_a - log_b) - log_std"),
    # flows
    Mutation("flows/layers", "torch.where(self.mask, 0.0, log_slope).sum(-1)", "log_slope.sum(-1)"),
    Mutation("flows/layers", "log_scale = -self._log_scale(p)", "log_scale = self._log_scale(p)"),
    Mutation("flows/layers", "(dim - 1) * torch.log(tangential)", "dim * torch.log(tangential)"),
    Mutation(
        "flows/layers", "slope * t * t + bin_.first_slope * u", "slope * t + bin_.first_slope * u"
    ),
    Mutation("flows/layers", "(b * b + 4 * slope * slope *", "(b * b + 2 * slope * slope *"),
    Mutation(
        "flows/layers", "log_density - log_below - log_above", "log_density - log_below + log_above"
    ),
    Mutation(
        "flows/layers",
        "self.log_scale - 0.5 * torch.log(variance",
        "self.log_scale - torch.log(variance",
    ),
    Mutation("flows/layers", "(repeats * self.log_scale.sum())", "self.log_scale.sum()"),
    Mutation(
        "flows/layers", "self.weight.log_determinant() * pixels", "self.weight.log_determinant()"
    ),
    Mutation(
        "flows/layers",
        "self.r.diagonal(dim1=-2, dim2=-1) * self.r_tilde",
        "self.r_tilde.diagonal(dim1=-2, dim2=-1) * self.r_tilde",
    ),
    Mutation("flows/layers", "self.order.argsort() + 1", "self.order + 1"),
    Mutation(
        "flows/layers", "return y, -sum_event(distribution", "return y, sum_event(distribution"
    ),
    # likelihoods
    Mutation("likelihoods", "-0.5 * z.square() - 0.5 * LOG_2PI", "-0.5 * z.square() - LOG_2PI"),
    Mutation(
        "likelihoods", "(v + 1) * torch.log1p(z.square() / v)", "v * torch.log1p(z.square() / v)"
    ),
    Mutation("likelihoods", "(v + 1) / (v + 3)", "(v + 1) / (v + 2)"),
    Mutation("likelihoods", "pairs + 0.5 * diagonal", "pairs + diagonal"),
    Mutation(
        "likelihoods",
        "* torch.exp(-log_scale)) - log_scale",
        "* torch.exp(-log_scale)) + log_scale",
    ),
    Mutation(
        "likelihoods", "y * f - f.exp() - torch.lgamma(y + 1)", "y * f - f.exp() - torch.lgamma(y)"
    ),
    Mutation(
        "likelihoods", "f.exp() - torch.exp(f + variance / 2)", "f.exp() - torch.exp(f + variance)"
    ),
    Mutation("likelihoods", "* f - variance / 2)", "* f - variance)"),
    Mutation("likelihoods", "1 + math.pi / 8 * variance", "1 + math.pi / 4 * variance"),
    Mutation("likelihoods", "mixture - math.log(len(f))", "mixture"),
    Mutation("likelihoods", "column[:, position] = -p * p[", "column[:, position] = p * p["),
    Mutation(
        "likelihoods", "terms.logsumexp(0) - math.log(len(self.outputs))", "terms.logsumexp(0)"
    ),
    Mutation("likelihoods", "p.cumsum(-1) - p", "p.cumsum(-1)"),
    Mutation("likelihoods", "(1 - self.label_smoothing) * value", "value"),
]


def locate(mutation: Mutation) -> Path:
    """Return the file of a mutation.

    Raises:
        ValueError: if its line does not occur exactly once in its package.
    """
    folder = ROOT / "src/bayou" / mutation.package
    files = []
    for path in sorted(folder.rglob("*.py")):
        files += [path] * path.read_text().count(mutation.old)
    if len(files) != 1:
        raise ValueError(
            f"{mutation.package}: {mutation.old!r} occurs {len(files)} times, not once; "
            "renew this mutation"
        )
    return files[0]


def find_problems(mutations: Sequence[Mutation]) -> list[str]:
    """Return why mutations cannot be applied, and which tests do not exist."""
    problems = []
    for mutation in mutations:
        try:
            locate(mutation)
        except ValueError as error:
            problems.append(str(error))
    for package, tests in TESTS.items():
        missing = [test for test in tests if not (ROOT / test).exists()]
        problems += [f"{package}: there is no {test}" for test in missing]
    return problems


def run_tests(package: str, mutation: Mutation | None, limit: float) -> Outcome:
    """Run the tests of a package on a copy of the source, after a mutation if there is one."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        for entry in COPIED:
            shutil.copytree(ROOT / entry, folder / entry)
        shutil.copy2(ROOT / "pyproject.toml", folder)
        if mutation is not None:
            path = folder / locate(mutation).relative_to(ROOT)
            path.write_text(path.read_text().replace(mutation.old, mutation.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no"]
        command += ["-p", "no:cacheprovider", *TESTS[package]]
        environment = os.environ | {
            "PYTHONPATH": str(folder / "src"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            result = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return Outcome(None, f"no result in {limit:.0f} s", time.monotonic() - begin)
    seconds = time.monotonic() - begin
    failure = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    if result.returncode == 1 and failure and "::" in failure.group(1):
        return Outcome(failure.group(1), "", seconds)
    if result.returncode == 0:
        return Outcome(None, "survived", seconds)
    return Outcome(None, f"pytest ended with {result.returncode}: {result.stdout[-200:]}", seconds)


def format_row(mutation: Mutation, outcome: Outcome) -> str:
    """Return a row of the table."""
    place = str(locate(mutation).relative_to(ROOT / "src/bayou"))
    killed_by = outcome.killed_by or f"**{outcome.problem}**"
    cells = (place, f"`{mutation.old}`", f"`{mutation.new}`", killed_by, f"{outcome.seconds:.0f}")
    return "| " + " | ".join(cells) + " |"


def write_table(outcomes: dict[Mutation, Outcome]) -> None:
    """Write the table of all mutations; those that were not run keep their rows."""
    earlier = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = []
    for mutation in MUTATIONS:
        if mutation in outcomes:
            rows.append(format_row(mutation, outcomes[mutation]))
        else:
            cells = f"| `{mutation.old}` | `{mutation.new}` |"
            rows += [row for row in earlier if cells in row]
    TABLE.write_text(HEADER + "\n".join(rows) + "\n")


def main() -> int:
    """Run the mutations that the options select, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of each")
    parser.add_argument("--only", default="", help="mutations whose package or line contains this")
    parser.add_argument("--write", action="store_true", help="update tests/mutations.md")
    parser.add_argument("--check", action="store_true", help="only check that each can be applied")
    options = parser.parse_args()
    selected = [m for m in MUTATIONS if options.only in f"{m.package}: {m.old}"]
    problems = find_problems(selected)
    if problems or options.check:
        print("\n".join(problems))
        return int(bool(problems))
    print(HEADER, end="", flush=True)
    outcomes: dict[Mutation, Outcome] = {}
    controls = [] if options.only else list(TESTS)
    with ThreadPoolExecutor(options.jobs) as pool:
        unchanged = [pool.submit(run_tests, name, None, options.limit) for name in controls]
        jobs = [pool.submit(run_tests, m.package, m, options.limit) for m in selected]
        for mutation, job in zip(selected, jobs, strict=True):
            outcomes[mutation] = job.result()
            print(format_row(mutation, outcomes[mutation]), flush=True)
            if options.write:
                write_table(outcomes)
    survivors = sum(outcome.killed_by is None for outcome in outcomes.values())
    print(f"\n{len(selected) - survivors} of {len(selected)} mutations were killed.")
    failures = 0
    for name, job in zip(controls, unchanged, strict=True):
        outcome = job.result()
        if outcome.problem != "survived":
            failures += 1
            print(f"Without a mutation, the tests of {name} fail: {outcome}")
    return int(survivors + failures > 0)


if __name__ == "__main__":
    sys.exit(main())
