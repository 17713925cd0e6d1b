"""The page's notebook runs, and is committed without outputs."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def notebook(root):
    import nbformat

    return nbformat.read(root / "notebooks" / "explorer.ipynb", as_version=4)


def test_no_outputs_are_committed(notebook):
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)


def test_it_runs_and_shows_the_page(notebook, root, monkeypatch):
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("QUERY_STRING", "micro_batch=8&stage=3")
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(root)}}).execute()
    (shown,) = notebook.cells[-1].outputs
    view = shown["data"]["application/vnd.jupyter.widget-view+json"]["model_id"]
    models = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    assert view in models
    htmls = " ".join(str(m["state"].get("value", "")) for m in models.values() if m["model_name"] == "HTMLModel")
    assert "ex-sentence" in htmls and "ex-table" in htmls
    tools = next(m["state"] for m in models.values() if "owns_page" in m["state"])
    assert json.loads(tools["job"])["micro_batch"] == 8 and "micro_batch=8" in tools["query"]
