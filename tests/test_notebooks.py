"""The notebooks: committed without outputs, and each runs from top to bottom, with no GPU and without PyTorch in its kernel."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from explorer.measure import records
from explorer.setup import Setup

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LESSON = ROOT / "notebooks" / "clip-out-of-memory.ipynb"

_LAST_CELL = """
import json, sys
print(json.dumps(sorted({"torch", "transformers", "deepspeed", "altair"} & set(sys.modules))))
"""


@pytest.fixture(scope="module")
def executed() -> dict[Path, nbformat.NotebookNode]:
    """Every notebook with its outputs; each is run once. A cell that raises fails the tests that ask for it."""
    return {}


def run(path: Path, done: dict[Path, nbformat.NotebookNode], monkeypatch: pytest.MonkeyPatch) -> nbformat.NotebookNode:
    """The executed notebook, with one more cell that lists the heavy packages its kernel has imported."""
    if path not in done:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        notebook = nbformat.read(path, 4)
        notebook.cells.append(nbformat.v4.new_code_cell(_LAST_CELL))
        NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(path.parent)}}).execute()
        done[path] = notebook
    return done[path]


def text_of(cell: nbformat.NotebookNode) -> str:
    """What a code cell printed or displayed, as text."""
    parts = [output.get("text") or output.get("data", {}).get("text/markdown") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "\n".join(parts)


def lesson_cell(name: str, done: dict[Path, nbformat.NotebookNode], monkeypatch: pytest.MonkeyPatch) -> str:
    """The output of one of the lesson's cells."""
    notebook = run(LESSON, done, monkeypatch)
    return text_of(next(cell for cell in notebook.cells if cell.get("id") == name))


def table_of(text: str) -> dict[str, list[str]]:
    """First cell of each row of a Markdown table → its other cells."""
    rows = [[cell.strip().strip("*") for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_no_outputs_are_committed(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_runs_and_its_kernel_imports_nothing_heavy(path: Path, executed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = run(path, executed, monkeypatch)
    assert text_of(notebook.cells[-1]).strip() == "[]"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_shows_the_page(path: Path, executed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = run(path, executed, monkeypatch)
    views = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs if "application/vnd.jupyter.widget-view+json" in output.get("data", {})]
    assert len(views) == 1


# --- the lesson's claims, each against what its cells say


def test_activations_are_nearly_everything(executed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    said = lesson_cell("categories", executed, monkeypatch)
    share = int(said.split("activations: ")[1].split("%")[0])
    assert share >= 95


def test_the_usual_advice_moves_less_than_a_gib(executed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table_of(lesson_cell("stage-3", executed, monkeypatch))
    alone, offloaded, everything = (float(cell.split()[0]) for cell in rows["allocated at the peak"])
    assert abs(offloaded - everything) < 1.0
    assert 4.0 < alone - offloaded < 5.5  # fp32 weights and two moments: 12 bytes × 428 million, less a staging bucket
    assert rows["320, stage 3, both offloaded"][2] == "does not fit"


def test_gradients_leave_the_gpu_with_the_optimizer(executed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table_of(lesson_cell("stage-3", executed, monkeypatch))
    alone, offloaded, _ = (float(cell.split()[0]) for cell in rows["left on the GPU when backward ends"])
    optimizer = float(rows["optimizer"][0].split()[0])
    assert alone - offloaded - optimizer == pytest.approx(0.8, abs=0.2)  # 2 bytes × 428 million of gradients


def test_fp16_halves_activations_and_not_the_optimizer(executed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table_of(lesson_cell("precision", executed, monkeypatch))
    fp32, fp16, _ = (float(cell.split()[0]) for cell in rows["activations"])
    assert fp16 / fp32 == pytest.approx(0.5, abs=0.02)
    host32, host16, _ = (float(cell.split()[0]) for cell in rows["on the host, per process"])
    assert host16 / host32 > 0.8


def test_no_allocator_option_makes_320_fit(executed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table_of(lesson_cell("fragmentation", executed, monkeypatch))
    assert [rows[name][2] for name in rows if name.startswith("320")] == ["does not fit"] * 2
    assert "fits" not in [rows[name][2] for name in rows if name.startswith("288")]


def test_a_disagreeing_batch_is_named(executed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    said = lesson_cell("started", executed, monkeypatch)
    assert "micro_batch: is 256 but deepspeed.train_micro_batch_size_per_gpu is 64" in said


def test_checkpointing_is_the_cure(executed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table_of(lesson_cell("checkpointing", executed, monkeypatch))
    assert [rows[f"{n}, checkpointed"][2] for n in (320, 1024)] == ["fits", "fits"]


def test_the_last_job_is_a_job(executed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    job = Setup.from_job(json.loads(lesson_cell("job", executed, monkeypatch)))
    assert job.gradient_checkpointing is True and job.micro_batch == 320


# --- the lesson beside its measurements

MEASURED = {  # what the H200 did, held to 78 GiB
    "micro-batch 256": "fits",
    "micro-batch 280": "fits",
    "micro-batch 288": "does not fit (backward)",
    "micro-batch 320": "does not fit (forward)",
    "320, stage 3, both offloads": "does not fit (forward)",
    "320, gradient checkpointing": "fits",
}


@pytest.mark.parametrize("job", MEASURED)
def test_every_job_of_the_lesson_has_a_measurement(job: str, executed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records ship; the estimate is never wrong about them (tight is no claim), and within 3 % where the job ran."""
    estimated_peak, estimated, measured_peak, measured, off = table_of(lesson_cell("measured", executed, monkeypatch))[job]
    assert measured_peak != "not recorded"
    assert measured == MEASURED[job]
    assert estimated.split(" (")[0] in ("tight", measured.split(" (")[0])
    if measured == "fits":
        assert abs(float(off.rstrip("%"))) <= 3.0


def test_the_recorded_message_reads_as_pytorchs(executed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    said = lesson_cell("message", executed, monkeypatch)
    assert said.startswith("CUDA out of memory. Tried to allocate")
    assert "GiB allowed" in said


def test_shipped_records_were_measured_on_a_gpu() -> None:
    shipped = [record for record in records.all() if record.shipped]
    assert shipped
    assert {record.profile.measured_on for record in shipped} == {"cuda"}
    assert all(record.profile.source == "measured" and "H200" in record.profile.environment["gpu"] for record in shipped)
