"""What the site has beside its pages: the text for programs, notebooks, the picture."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from docs import make_gallery

DOCS = Path(__file__).parents[1] / "docs"


def page(title, text):
    from docutils.core import publish_doctree

    return publish_doctree(f"{title}\n{'=' * len(title)}\n\n{text}\n")


@pytest.fixture
def site_files():
    """The module of the documentation's build, which needs docutils."""
    from docs import site_files

    return site_files


@pytest.fixture
def app(tmp_path, site_files):
    documents = {
        "index": page("Start", "The first page. More of it."),
        "guide": page("Guide", "By task: what to do."),
        "api": page("API", ""),
    }
    titles = {
        name: document.next_node(site_files.nodes.title) for name, document in documents.items()
    }
    builder = SimpleNamespace(name="html", get_target_uri=lambda name: f"{name}.html")
    env = SimpleNamespace(
        toctree_includes={"index": ["guide", "api"], "guide": ["api"]},
        titles=titles,
        get_doctree=documents.get,
    )
    config = SimpleNamespace(root_doc="index", release="1.0.0")
    return SimpleNamespace(env=env, builder=builder, config=config, outdir=str(tmp_path))


@pytest.mark.peers
def test_llms_text_lists_every_page_once_in_order_with_a_sentence(app, site_files):
    lines = site_files.llms_text(app).splitlines()
    assert lines[0] == "# bayou"
    assert lines[2] == f"> {site_files.PROJECT['description']}"
    assert lines[6:] == [
        "- [Start](index.html): The first page",
        "- [Guide](guide.html): By task: what to do",
        "- [API](api.html)",
    ]


@pytest.mark.peers
def test_the_sentence_of_a_page_is_none_of_its_tables(site_files):
    table = "=====  ====\ntask   page\n=====  ====\nfit    one\n=====  ====\n"
    assert site_files.first_sentence(page("Guide", f"{table}\nBy task. More.")) == "By task"
    assert site_files.first_sentence(page("Guide", table)) == "task"
    assert site_files.first_sentence(page("Guide", "- an item")) == "an item"


@pytest.mark.peers
def test_files_beside_the_pages_are_written_by_a_build_that_succeeded(app, site_files, tmp_path):
    site_files.write_files(app, ValueError("a warning"))
    assert not list(tmp_path.iterdir())
    site_files.write_files(app, None)
    assert {"llms.txt", "versions.json", "notebooks"} == {path.name for path in tmp_path.iterdir()}
    versions = json.loads((tmp_path / "versions.json").read_text(encoding="utf-8"))
    assert versions == [{"name": "1.0.0", "folder": "1.0.0"}]


@pytest.mark.peers
def test_pages_have_a_picture_that_exists_and_the_missing_page_a_base(app, site_files, monkeypatch):
    context = {"title": "A &amp; B", "metatags": '<meta name="x">'}
    site_files.add_metadata(app, "guide", "page.html", context, None)
    tags = context["metatags"]
    assert tags.startswith('<meta name="x">')
    assert '<meta property="og:title" content="A &amp; B">' in tags
    assert (DOCS.parent / site_files.PICTURE).exists()
    assert f"/raw/main/{site_files.PICTURE}" in tags
    assert "<base" not in tags
    monkeypatch.setenv(site_files.BASE, "/bayou/latest/")
    context = {"title": "There is no such page"}
    site_files.add_metadata(app, "404", "page.html", context, None)
    assert '<base href="/bayou/latest/">' in context["metatags"]
    assert (DOCS / "404.md").exists()


def test_colab_opens_the_notebooks_that_the_site_publishes():
    assert make_gallery.COLAB == (
        "https://colab.research.google.com/github/bayou-ml/bayou/blob/gh-pages/latest/notebooks"
    )
    example = next(iter(make_gallery.examples().values()))
    assert f"{make_gallery.COLAB}/{example.name}.ipynb" in make_gallery.page(example)


def test_a_notebook_installs_what_it_imports():
    """Beside Python itself: what the core and the lab extra bring."""
    lab = {"bayou", "torch", "numpy", "matplotlib", "sklearn", "PIL", "scipy", "jinja2", "rich"}
    examples = make_gallery.examples()
    for example in examples.values():
        imported = set(re.findall(r"^\s*(?:import|from) (\w+)", example.text, re.MULTILINE))
        needed = imported - set(sys.stdlib_module_names) - lab
        assert needed <= set(make_gallery.install(example).split()), example.name
    assert make_gallery.install(examples["optimize"]).endswith('"bayou[lab]" botorch')
    cells = json.loads(make_gallery.notebook(examples["optimize"]))["cells"]
    assert cells[1]["source"] == ['%pip install -q "bayou[lab]" botorch']
