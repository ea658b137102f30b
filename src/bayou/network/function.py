"""A network as a pure function of its named tensors, which threads may call in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bayou.core import rng
from bayou.core.files import no_grad_state
from bayou.core.params import Params
from bayou.network.copies import Shell, release_weights, skeleton
from bayou.network.dry_run import DryRun, SizeRecorder, input_format, run_dry, sample_rows
from bayou.network.mapping import PlainAttention

# The largest fraction of the numbers computed by a network that depends on draws, up to which draws
# are mapped to share the rest.
MAX_DRAWN_FRACTION = 0.25


class Network:
    """f(w, x): a copy of a network without weights of its own, called with named tensors.

    ``net`` is the copy; its free parameters (``names``) are empty placeholders, its frozen ones
    (those that require no gradient) are shared with the original network, and its buffers (running
    statistics) are its own. ``call`` takes the free parameters and, if wanted, other values of
    frozen ones and buffers. Tied weights have one name.

    Args:
        net: the network; it is not changed.
    """

    aliases: dict[str, str]
    net: nn.Module

    recomputes: bool = False  # whether it is known to use gradient checkpointing

    def __init__(self, net: nn.Module) -> None:
        self.names: list[str] = [
            name for name, parameter in net.named_parameters() if parameter.requires_grad
        ]
        self.frozen: bool = any(not parameter.requires_grad for parameter in net.parameters())
        self.net, self.aliases = skeleton(net)
        self._tied = self._find_tied_tensors()
        self._recurrent = tuple(
            module for module in self.net.modules() if isinstance(module, nn.RNNBase)
        )
        self._shells: list[Shell] = []  # those that are not in use
        self._dry_runs: dict[Any, DryRun] = {}
        self._drawn_fractions: dict[Any, float] = {}

    def _find_tied_tensors(self) -> dict[str, str]:
        """Return the aliases that are tensors of their own.

        Those of a module that is used twice are not.
        """
        placeholders = dict(self.net.named_buffers(remove_duplicate=False))
        seen = {id(placeholders[name]) for name in self.names}
        tied: dict[str, str] = {}
        for alias, name in self.aliases.items():
            if id(placeholders[alias]) not in seen:
                seen.add(id(placeholders[alias]))
                tied[alias] = name
        return tied

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_shells": [], "_dry_runs": {}, "_drawn_fractions": {}}

    def call(self, params: Params, *inputs: object) -> Tensor:
        """Return the outputs with these tensors, one call at a time.

        The modules of ``net`` are in the mode (train or eval) that they have.

        Args:
            params: the free parameters; other values of frozen ones and buffers, if wanted.
            inputs: the arguments of the network.
        """
        if self.recomputes and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            outputs: Tensor = _Recomputing.apply(self, inputs, [*params], *params.values())  # type: ignore[no-untyped-call]
            return outputs
        return self._call_with(params, self.net, inputs)

    def _call_with(
        self, params: Params, module: nn.Module, inputs: tuple[Any, ...], prefix: str = ""
    ) -> Any:
        """Return ``module(*inputs)`` with these tensors of ``net``.

        The module is ``net``, or contains it with this prefix.
        """
        tensors = params | {alias: params[name] for alias, name in self._tied.items()}
        if prefix:
            tensors = {prefix + name: value for name, value in tensors.items()}
        out = functional_call(module, tensors, inputs, tie_weights=False)
        for rnn in self._recurrent:
            release_weights(rnn)
        return out

    def find_recomputation(self, params: Params, inputs: tuple[Any, ...]) -> None:
        """Test whether a backward pass calls modules again: gradient checkpointing.

        The test is a pass over three rows, whose errors are left to the real call.

        Args:
            params: the free parameters.
            inputs: the arguments of the network.
        """
        calls: list[nn.Module] = []
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        net = self._copy_with(leaves).train()
        for module in net.modules():
            module.register_forward_pre_hook(lambda module, _: calls.append(module))
        with rng.isolated(0, inputs[0].device), torch.enable_grad(), suppress(Exception):
            out = net(*sample_rows(inputs, 3))
            forward_calls = len(calls)
            if out.requires_grad:
                out.sum().backward()
            self.recomputes = len(calls) > forward_calls

    def _copy_with(self, params: Params) -> nn.Module:
        """Return a copy with these tensors and with buffers of its own."""
        shell = Shell(self.net, self.aliases)
        shell.fill(params | {name: buffer.clone() for name, buffer in self.buffers().items()})
        return shell.net

    def evaluate(self, params: Params, *inputs: object) -> Tensor:
        """Return the outputs with these tensors in eval mode.

        This is a pure function, which threads may call concurrently: each call uses its own shell
        of the network, and ``net`` is not changed.

        Args:
            params: the free parameters; other values of frozen ones and buffers, if wanted.
            inputs: the arguments of the network.
        """
        if torch.compiler.is_compiling():  # a trace needs the modules themselves
            return self.call(params, *inputs)
        try:
            shell = self._shells.pop()
        except IndexError:
            shell = Shell(self.net, self.aliases)
        try:
            shell.fill(params)
            out: Tensor = shell.net(*inputs)
            return out
        finally:
            shell.empty()
            self._shells.append(shell)

    def dry_run(self, make_params: Callable[[], Params], inputs: tuple[Any, ...]) -> DryRun:
        """Return the result of a dry run in eval mode, which is stored for inputs of this format.

        An error is left to the real call.

        Args:
            make_params: gives the tensors.
            inputs: the arguments of the network.
        """
        key = input_format(inputs)
        if key not in self._dry_runs:
            tensors = make_params()
            params = {name: tensors[name] for name in self.names}
            try:
                has_images = any(isinstance(module, nn.Conv2d) for module in self.net.modules())
                self._dry_runs[key] = run_dry(
                    lambda *rows: self.evaluate(params, *rows), inputs, has_images
                )
            except Exception:
                return DryRun()
        return self._dry_runs[key]

    @torch.no_grad()
    def drawn_fraction(
        self, names: Collection[str], params: Params, inputs: tuple[Any, ...]
    ) -> float:
        """Return the fraction of the numbers computed by the network that depends on tensors.

        A map over draws computes the rest once.

        Args:
            names: the names of the tensors.
            params: the free parameters.
            inputs: the arguments of the network.

        Returns:
            The fraction; 1 where a map is not worth it, or not possible.
        """
        if not self.frozen and set(names) >= set(self.names):
            return 1.0
        key = (frozenset(names), input_format(inputs))
        if key not in self._drawn_fractions:
            self._drawn_fractions[key] = self._measure_drawn_fraction(names, params, inputs)
        return self._drawn_fractions[key]

    def _measure_drawn_fraction(
        self, names: Collection[str], params: Params, inputs: tuple[Any, ...]
    ) -> float:
        """Map one draw of the tensors, and compare the sizes of what depends on it and of all."""
        draws = {name: params[name].unsqueeze(0) for name in names}
        recorder = SizeRecorder()
        rows = sample_rows(inputs, 2)
        fraction = 1.0

        def call(draw: Params) -> Tensor:
            with recorder:
                return self.evaluate(params | draw, *rows)

        with rng.isolated(0, inputs[0].device), PlainAttention(), suppress(Exception):
            vmap(call, randomness="different")(draws)
            fraction = recorder.drawn_size / sum(recorder.sizes)
        return fraction if fraction <= MAX_DRAWN_FRACTION else 1.0

    def unreached_names(
        self, params: Params, names: Collection[str], inputs: tuple[Any, ...]
    ) -> list[str]:
        """Return those of the names whose tensors no gradient of the outputs reaches.

        Tested with two rows in eval mode and, for the names that remain, with all rows in training
        mode, which may use more heads or experts.

        Args:
            params: the free parameters.
            names: the names to test.
            inputs: the arguments of the network.
        """
        leaves = {name: params[name].detach().requires_grad_(name in names) for name in self.names}
        net = self._copy_with(leaves)
        unreached = list(names)
        with rng.isolated(0, inputs[0].device), torch.enable_grad():
            for is_training, rows in ((False, sample_rows(inputs, 2)), (True, inputs)):
                outputs = net.train(is_training)(*rows)
                if outputs.requires_grad:
                    outputs.sum().backward()
                unreached = [name for name in unreached if leaves[name].grad is None]
                if not unreached:
                    break
        return unreached

    def buffers(self) -> Params:
        """Return the persistent buffers of the network, without constants."""
        return no_grad_state(self.net)


class _Backward(nn.Module):
    """The backward pass as a module, during which ``functional_call`` gives ``net`` its tensors."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, outputs: Tensor, grad: Tensor) -> None:
        torch.autograd.backward(outputs, grad)


class _Recomputing(torch.autograd.Function):
    """A call of a network that computes parts of itself again in the backward pass.

    It has its tensors there, too. Its gradients have no graph, so that a derivative which is to be
    differentiated again raises an error.
    """

    @staticmethod
    def forward(
        ctx: Any, network: Network, inputs: tuple[Any, ...], names: list[str], *values: Tensor
    ) -> Tensor:
        ctx.network = network
        ctx.leaves = {
            name: value.detach().requires_grad_(value.requires_grad)
            for name, value in zip(names, values, strict=True)
        }
        with torch.enable_grad():
            ctx.out = network._call_with(ctx.leaves, network.net, inputs)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # True for create_graph=True; torch's once_differentiable does not notice autograd.grad.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "a network with gradient checkpointing has only first derivatives; "
                "create_graph=True was requested: turn checkpointing off"
            )
        backward = _Backward(ctx.network.net)
        ctx.network._call_with(ctx.leaves, backward, (ctx.out, grad), "net.")
        return None, None, None, *(leaf.grad for leaf in ctx.leaves.values())
