"""The same run with `transformers.Trainer` in the driver's seat: for a job with a `trainer` part (torch).

The Trainer gets the job's arguments and DeepSpeed JSON, "auto" values and all, makes its own optimizer, and calls DeepSpeed through
accelerate. Phases are marked where the plain run marks them: the forward begins with `training_step`, the backward with the
engine's `backward`, the step with its `step`.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from explorer.dsconfig.arguments import OWN_ARGUMENTS, warms_up_for_nothing
from explorer.errors import BadInput, CouldNotRun
from explorer.measure.owners import storages
from explorer.measure.run import MOST_STEPS, Run, StepReading, out_of_memory
from explorer.profile import Profile

FORCED: dict[str, Any] = {
    "max_steps": MOST_STEPS, "save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True,
    "push_to_hub": False, "load_best_model_at_end": False, "eval_on_start": False, "auto_find_batch_size": False,
    "dataloader_num_workers": 0, "dataloader_persistent_workers": False, "dataloader_prefetch_factor": None,
}
"""A few steps of this batch: nothing is saved, evaluated, logged or sent anywhere, and the loader stays in this process."""
_REFUSALS = ("ValueError", "TypeError", "KeyError", "AttributeError", "AssertionError", "NotImplementedError", "ValidationError", "ZeRORuntimeException", "DeepSpeedConfigError")


class TrainerRun(Run):
    """A probe whose step is the Trainer's."""

    def __init__(self, setup: Any, emit: Any, world: Any = None) -> None:
        super().__init__(setup, emit, world)
        self.trainer: Any = None
        self.reading: StepReading | None = None
        self.micro = 0
        self.folder = ""
        self.notes.append(f"the step was run by transformers.Trainer; the model is built on the host in {self.settings.precision}, where from_pretrained loads its config's dtype and DeepSpeed casts it before it moves it")

    def profile(self) -> Profile:
        """The whole run, with an output folder that goes with it."""
        with tempfile.TemporaryDirectory(prefix="explorer-trainer-") as self.folder:
            return super().profile()

    def _initialize(self) -> None:
        """Up to a Trainer that has not begun: its `train` initializes DeepSpeed too."""
        import deepspeed

        self.say("building the model")
        self.meter.begin_init()
        deepspeed.init_distributed(verbose=False)
        model = self._counted(self._build())
        model.to = _around(model.to, self._moved)
        with _Refusals(self):
            self.trainer = _trainer(self, model)

    def _steps(self) -> None:
        self.say("deepspeed.initialize, by the Trainer")
        with _Refusals(self):
            self.trainer.train()
        self._conclude()

    def build_device(self) -> str:
        """The host: DeepSpeed moves the model, tensor by tensor."""
        return "cpu"

    def _moved(self, plain: Any, *args: Any, **kwargs: Any) -> Any:
        """On the GPU the weights have new addresses; most are copied once more before initialization ends, and gone by then."""
        model = plain(*args, **kwargs)
        self.meter.built(model, "parameters")
        return model

    # --- what the Trainer is given

    def arguments(self) -> dict[str, Any]:
        """The job's TrainingArguments, with what the job says elsewhere filled in where they are silent."""
        given = {k: v for k, v in json.loads(json.dumps(dict(self.setup.trainer or {}), default=dict)).items() if k not in OWN_ARGUMENTS}
        filled = {"per_device_train_batch_size": self.setup.micro_batch, "gradient_accumulation_steps": self.settings.gradient_accumulation_steps}
        model = {"use_cache": self.setup.use_cache, "gradient_checkpointing": False}  # the model checkpoints already
        starts = {"warmup_steps": 1} if warms_up_for_nothing(self.setup) else {}  # a schedule moves no memory; that this one is refused is a finding
        return {**filled, **given, **FORCED, **model, **starts, "output_dir": self.folder, "deepspeed": self._json()}

    def _json(self) -> dict[str, Any]:
        """The DeepSpeed JSON as the job has it; an absent batch size is the job's, which "auto" gives."""
        config = json.loads(json.dumps(dict(self.setup.deepspeed), default=dict))
        if config.get("train_micro_batch_size_per_gpu") is None:
            config["train_micro_batch_size_per_gpu"] = "auto"
        self._without_compiler(config)
        self._swap_here(config)
        return config

    # --- the Trainer's moments

    def began(self) -> None:
        """DeepSpeed is ready; no batch has been fetched."""
        self.engine = self.trainer.model_wrapped
        self.meter.watch(self.engine, self.settings)
        self.init = self.meter.end_init()
        self.engine.backward = _around(self.engine.backward, self._backward)
        self.engine.step = _around(self.engine.step, self._step_once)

    def fetched(self, batches: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """All micro-batches of the next step, on the device. On the CPU accelerator they are copied, as moving to a GPU would."""
        if self.device == "cpu":
            batches = [{name: _copy(value) for name, value in batch.items()} for batch in batches]
        self.meter.batch({"batches": list(batches)})
        self.reading = StepReading(first_mark=self.meter.here())
        self.micro = 0
        return batches

    def forward_begins(self) -> None:
        """`training_step` has been called."""
        self.phase, self.step_name = "forward", "steady" if self._applied() else "first"
        self.say(f"step {len(self.steps) + 1}: forward" + (f" of micro-batch {self.micro + 1}" if self.micro else ""))
        self.micro += 1
        self.meter.begin("forward")

    def _backward(self, plain: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        self._phase_ends("forward")
        self.look_at(loss)
        self.phase = "backward"
        self.say(f"step {len(self.steps) + 1}: backward")
        self.meter.begin("backward")
        result = plain(loss, *args, **kwargs)
        self._phase_ends("backward")
        return result

    def _step_once(self, plain: Any, *args: Any, **kwargs: Any) -> Any:
        skipped = self._skipped()
        self.phase = "step"
        self.say(f"step {len(self.steps) + 1}: optimizer step")
        self.meter.begin("step")
        result = plain(*args, **kwargs)
        self._phase_ends("step")
        self.reading.applied, self.reading.traced = self._skipped() == skipped, self._traced()
        self.reading.last_mark = self.meter.here()
        self.steps.append(self.reading)
        return result

    def _phase_ends(self, phase: str) -> None:
        self.reading.phases.setdefault(phase, []).append(self.meter.end(phase))

    def environment(self) -> dict[str, str | None]:
        import accelerate

        return {"accelerate": accelerate.__version__}


class _Refusals:
    """What the Trainer refuses becomes bad input, what else fails in it a reason why it could not run; memory that runs out is a result."""

    def __init__(self, run: TrainerRun) -> None:
        self.run = run

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, BadInput | CouldNotRun) or out_of_memory(error):
            return
        text = " ".join(str(error).split())[:600] or type(error).__name__
        if self.run.engine is None and {c.__name__ for c in type(error).__mro__} & set(_REFUSALS):
            raise BadInput("trainer", f"is refused by the Trainer: {text}") from error
        traceback.print_exception(error)
        raise CouldNotRun(f"the Trainer could not run the step: {type(error).__name__}: {text}") from error


def _trainer(run: TrainerRun, model: Any) -> Any:
    """A Trainer that tells `run` of its moments."""
    if importlib.util.find_spec("accelerate") is None:
        raise CouldNotRun("a job with a trainer part needs accelerate: pip install accelerate")
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, training_args

    if run.device == "cpu":
        training_args.is_torch_bf16_gpu_available = lambda: True  # it asks for a GPU; DeepSpeed's CPU accelerator has bf16
        _ranks_on_cpu()

    class Watched(Trainer):
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            batches, items = super().get_batch_samples(*args, **kwargs)
            return run.fetched(batches), items

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            run.forward_begins()
            return super().training_step(*args, **kwargs)

    class Moments(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            run.began()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = run.done()

    arguments = TrainingArguments(**run.arguments())
    rows = _Rows(run)
    trainer = Watched(model=model, args=arguments, train_dataset=rows, data_collator=rows.collate, callbacks=[Moments])
    trainer.remove_callback(PrinterCallback)
    return trainer


def _ranks_on_cpu() -> None:
    """Without a GPU accelerate takes DeepSpeed's job for one process; let it ask the process group (accelerate/state.py, `_prepare_backend`)."""
    import os

    from accelerate.state import DistributedType, PartialState

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)


class _Rows:
    """A data set on the host that repeats the job's batch, long enough for every rank and step."""

    def __init__(self, run: TrainerRun) -> None:
        self.meter, self.batch = run.meter, run.batch_on("cpu")
        self.meter.mark("rows", dict.fromkeys(storages(self.batch.values()), "host"))
        self.micro = run.setup.micro_batch
        self.length = self.micro * run.setup.world_size * run.settings.gradient_accumulation_steps * (MOST_STEPS + 1)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index % self.micro

    def collate(self, rows: Sequence[int]) -> dict[str, Any]:
        """These rows of the batch; what is no tensor as it is."""
        import torch

        batch = {name: value[list(rows)] if isinstance(value, torch.Tensor) else value for name, value in self.batch.items()}
        self.meter.mark("rows", dict.fromkeys(storages(batch.values()), "host"))
        return batch


def _around(plain: Any, ours: Any) -> Any:
    return lambda *args, **kwargs: ours(plain, *args, **kwargs)


def _copy(value: Any) -> Any:
    import torch

    return value.clone() if isinstance(value, torch.Tensor) else value
