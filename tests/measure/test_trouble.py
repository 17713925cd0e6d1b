"""What goes wrong and is a result all the same, or one sentence: a loss that is no number, no compiler, too little memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from explorer.errors import CouldNotRun
from explorer.measure import limits
from explorer.measure.run import Run, StepReading
from explorer.measure.runner import probe
from explorer.measure.world import StandIn
from explorer.setup import Setup
from explorer.units import GiB
from tests.measure.jobs import LLAMA, job

extra = pytest.mark.usefixtures("needs_extra")


def changed(setup: Setup, **deepspeed: object) -> Setup:
    """The job with other sections in its DeepSpeed config."""
    content = json.loads(json.dumps(setup.to_job()))
    content["deepspeed"] |= deepspeed
    return Setup.from_job(content)


# --- a loss that is no number


@extra
def test_a_loss_that_is_nan_is_a_note():
    wild = changed(job(LLAMA, 2), optimizer={"type": "AdamW", "params": {"lr": 1e30}})
    measured = probe(wild, save=False)
    note = next(note for note in measured.notes if "not finite" in note)
    last = measured.warmup_steps + 1
    assert re.match(rf"the loss was not finite in steps? 2 \((nan|inf)\).* of {last}, the measured one is among them", note)
    tame = probe(job(LLAMA, 2), save=False)
    assert measured.steps["first"] == tame.steps["first"]
    for phase in ("forward", "backward"):  # DeepSpeed skips the rest
        assert measured.phase("steady", phase).peak_allocated_bytes == pytest.approx(tame.phase("steady", phase).peak_allocated_bytes, abs=64)
    assert not any("not finite" in note for note in tame.notes)


# --- which step stands for the steady one


def run_of(*steps: StepReading) -> Run:
    """A run whose steps were these."""
    run = Run.__new__(Run)
    run.world, run.steps, run.odd_losses = StandIn(0, 1), list(steps), {}
    return run


def step(peak: int, applied: bool = True, traced: bool = True) -> StepReading:
    reading = SimpleNamespace(peak=peak, end=0)
    return StepReading(phases={"forward": [reading]}, applied=applied, traced=traced)


@pytest.mark.parametrize(("steps", "done"), [
    ([step(1), step(1)], False),  # the first makes the optimizer's states; the second may be the last to differ
    ([step(1), step(2), step(2)], True),
    ([step(1), step(2), step(3)], False),
    ([step(1), step(2, traced=False), step(2)], False),  # repeats itself, but stage 3 prefetched in the last one only
    ([step(1, traced=False), step(2), step(2)], True),
    ([step(1), step(2), step(2, applied=False)], False),  # skipped for overflow
    ([step(1, applied=False), step(2), step(2), step(2)], True),
])
def test_a_step_is_steady_once_it_repeats_one_that_had_all_it_needs(steps, done):
    assert run_of(*steps).done() == done


def test_steps_that_stay_skipped_are_not_tried_for_ever():
    run = run_of(step(1), *[step(2, applied=False)] * 3)
    assert not run.done()
    run.odd_losses = dict.fromkeys((2, 3, 4), float("nan"))
    assert run.done()


def test_ranks_stop_together():
    """One that stopped alone would leave the others in a collective."""

    class Slower(StandIn):
        def agree(self, number, done):
            return False

    run = run_of(step(1), step(2), step(2))
    assert run.done()
    run.world = Slower(0, 2)
    assert not run.done()


@extra
def test_stage_3_has_its_trace_from_the_second_step_on():
    code = (
        "import json, sys\nfrom explorer.measure.worker import preload\npreload()\n"
        "from explorer.measure.step import make_run\nfrom explorer.setup import Setup\n"
        "run = make_run(Setup.from_job(json.loads(sys.argv[1])), lambda message: None)\nprofile = run.profile()\n"
        "print(json.dumps([[step.traced for step in run.steps], profile.warmup_steps]))"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(job(LLAMA, 3, world_size=8).to_job())], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    traced, warmup = json.loads(done.stdout.splitlines()[-1])
    assert traced == [False] + [True] * warmup
    assert warmup >= 2


# --- no compiler


def without_compiler(setup: Setup) -> dict:
    """The probe's answer in a process that finds no program at all, with nothing compiled before; and no worker of others."""
    with tempfile.TemporaryDirectory(prefix="bare-") as place:
        env = {"HOME": place, "PATH": place, "XDG_RUNTIME_DIR": place, "EXPLORER_LOCKS": place, "TMPDIR": place, "TORCH_EXTENSIONS_DIR": f"{place}/extensions", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path.cwd())}
        code = "import json, sys\nfrom explorer.measure.runner import probe\nprint(json.dumps(probe(json.loads(sys.argv[1]), save=False).to_json()))"
        done = subprocess.run([sys.executable, "-c", code, json.dumps(setup.to_job())], env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@extra
@pytest.mark.parametrize("offload", [False, True])
def test_without_a_compiler_torchs_adamw_runs_and_the_record_says_so(offload):
    setup = job(LLAMA, 2, offload=offload)
    name = "DeepSpeedCPUAdam" if offload else "FusedAdam"
    bare = without_compiler(setup)
    assert [note for note in bare["notes"] if f"DeepSpeed's {name} could not be compiled here, so torch's AdamW ran instead" in note]
    compiled = probe(setup, save=False)
    assert not any("could not be compiled" in note for note in compiled.notes)
    assert bare["at_peak"]["parameters"] == compiled.at_peak["parameters"]
    assert bare["parameters"] == compiled.parameters


@extra
def test_an_optimizer_that_torch_has_not_is_refused_in_one_sentence(monkeypatch):
    from explorer.measure import kernels

    settings = SimpleNamespace(optimizer=SimpleNamespace(implementation="DeepSpeedCPULion"), offload_optimizer=object(), offload_param=None, stage=2)
    monkeypatch.setattr(kernels, "_load", lambda builder, say: "no c++")
    with pytest.raises(CouldNotRun, match=r"DeepSpeedCPULion could not be compiled here \(no c\+\+\); install a C\+\+ compiler and ninja"):
        kernels.build(settings, lambda text: None)


# --- too little memory


def machine(root: Path, available: int, group: tuple[str, int, int] | None = None) -> Path:
    """Files in which Linux says how much memory is free; `group`: its limit, what it uses, how much of that are files."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {available // 1024} kB\n")
    if group:
        at = root / "sys/fs/cgroup"
        at.mkdir(parents=True)
        for name, value in zip(("memory.max", "memory.current", "memory.stat"), (group[0], group[1], f"anon 1\ninactive_file {group[2]}"), strict=True):
            (at / name).write_text(f"{value}\n")
    return root


@pytest.mark.parametrize(("group", "free"), [(None, 16), (("max", GiB, 0), 16), ((str(4 * GiB), 3 * GiB, GiB), 2), ((str(GiB), 2 * GiB, 0), 0)])
def test_a_containers_limit_counts(tmp_path, group, free):
    assert limits._available_ram(machine(tmp_path, 16 * GiB, group)) == free * GiB


@extra
def test_a_job_that_does_not_fit_in_memory_is_refused(monkeypatch, tmp_path):
    root = machine(tmp_path, 64 * GiB, (str(2 * GiB), GiB, 0))
    plain = limits._available_ram
    monkeypatch.setattr(limits, "_available_ram", lambda: plain(root))
    setup = Setup(model="gpt2", micro_batch=1)
    assert re.search(r"the step would need about [\d.]+ GiB of the 1\.0+ GiB of host memory that is free", limits.why_not(setup))
    with pytest.raises(CouldNotRun, match="host memory that is free"):
        probe(setup, save=False)
    assert limits.why_not(job(LLAMA, 2)) is None
