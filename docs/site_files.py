"""Parts of the site around its pages: ``llms.txt``, notebooks at fixed addresses, the picture that
other sites show beside a link.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Source"]
PICTURE = "docs/pictures/densities.png"
PICTURE_TEXT = "two-dimensional densities and the normalizing flows fitted to them"
BASE = "BAYOU_SITE_BASE"  # the path of the published site, such as /bayou/latest/, for its 404 page
MAX_LINE = 200  # characters of the line of a page in llms.txt


def first_sentence(document: nodes.document) -> str:
    """Return the first sentence of the first paragraph of a page, "" if there is none.

    Cells of tables and items of lists are no sentences: they count only if there is nothing else.
    """
    paragraphs = list(document.findall(nodes.paragraph))
    own = [one for one in paragraphs if isinstance(one.parent, nodes.section | nodes.document)]
    for paragraph in [*own, *paragraphs]:
        text = " ".join(paragraph.astext().split())
        if text:
            sentence = text.partition(". ")[0].rstrip(".:")
            return sentence if len(sentence) <= MAX_LINE else sentence[: MAX_LINE - 1] + "…"
    return ""


def in_order(includes: dict[str, list[str]], name: str) -> list[str]:
    """Return a page and those below it, in the order of the tables of contents.

    Args:
        includes: the pages that each page lists.
        name: of the page.
    """
    pages = [name]
    for child in includes.get(name, ()):
        pages += [page for page in in_order(includes, child) if page not in pages]
    return pages


def llms_text(app: Any) -> str:
    """Return the list of pages with one line each, for programs that read (llmstxt.org)."""
    lines = [f"# {PROJECT['name']}", "", f"> {PROJECT['description']}", "", "## Pages", ""]
    for name in in_order(app.env.toctree_includes, app.config.root_doc):
        title = app.env.titles[name].astext()
        sentence = first_sentence(app.env.get_doctree(name))
        line = f"- [{title}]({app.builder.get_target_uri(name)})"
        lines.append(f"{line}: {sentence}" if sentence else line)
    return "\n".join(lines) + "\n"


def write_files(app: Any, exception: Exception | None) -> None:
    """Write what is no page; called at the end of a build."""
    if exception is not None or app.builder.name != "html":
        return
    out = Path(app.outdir)
    (out / "llms.txt").write_text(llms_text(app), encoding="utf-8")
    # That of a site on its own; python -m docs.release site writes that of all versions.
    version = app.config.release
    versions = json.dumps([{"name": version, "folder": version}])
    (out / "versions.json").write_text(versions, encoding="utf-8")
    (out / "notebooks").mkdir(exist_ok=True)
    for notebook in (HERE / "gallery").glob("*.ipynb"):
        shutil.copyfile(notebook, out / "notebooks" / notebook.name)


def add_metadata(
    app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Add the title and the picture that other sites show beside a link to a page."""
    title = context.get("title") or PROJECT["name"]
    values = {
        "og:type": "website",
        "og:site_name": PROJECT["name"],
        "og:title": html.unescape(re.sub(r"<[^>]+>", "", title)),
        "og:description": PROJECT["description"],
        "og:image": f"{REPOSITORY}/raw/main/{PICTURE}",
        "og:image:alt": PICTURE_TEXT,
    }
    tags = [
        f'<meta property="{name}" content="{html.escape(value)}">' for name, value in values.items()
    ]
    base = os.environ.get(BASE)
    if pagename == "404" and base:  # it is shown for addresses at any depth
        tags.insert(0, f'<base href="{html.escape(base)}">')
    context["metatags"] = "\n".join([context.get("metatags", ""), *tags])
