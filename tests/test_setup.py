"""Setup: job files good and bad, round trips, equality; and the answer's form (docs/contract.md)."""

from __future__ import annotations

import json

import pytest

from explorer.errors import BadInput
from explorer.jsonfile import parse_json
from explorer.setup import Setup

MINIMAL = {"model": "gpt2", "micro_batch": 8}
FULL = {
    "schema": 1,
    "model": "openai/clip-vit-large-patch14",
    "attention": "sdpa",
    "micro_batch": 64,
    "sequence": 77, "target_sequence": None, "image_size": 224,
    "padding": False, "use_cache": False,
    "gradient_checkpointing": False,
    "trainable": ["*"], "lora": None,
    "deepspeed": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}},
    "trainer": None,
    "deepspeed_version": None,
    "zero_init": True,
    "world_size": 8, "data_parallel_size": None, "gpus_per_node": 8, "rank": 0,
    "gpu": "A100-80GB", "capacity_gib": None, "host_ram_gib": None,
    "allocator": {"expandable_segments": False, "max_split_size_mb": None},
}
"""The job of the contract, word for word."""


def job(**changes):
    return {**MINIMAL, **changes}


# --- good jobs


def test_the_contracts_own_job_comes_back_unchanged():
    assert Setup.from_job(FULL).to_job() == FULL


def test_a_minimal_job_has_the_contracts_defaults():
    written = Setup.from_job(MINIMAL).to_job()
    assert set(written) == set(FULL)
    expected = {**FULL, **MINIMAL, "sequence": None, "image_size": None, "deepspeed": {}, "world_size": 1, "gpu": None, "allocator": {}}
    assert written == expected


GOOD = {
    "config object as the model": job(model={"model_type": "gpt2", "n_layer": 2}),
    "checkpointing object": job(gradient_checkpointing={"use_reentrant": True}),
    "checkpointing object, full": job(gradient_checkpointing={"use_reentrant": False, "preserve_rng_state": True, "determinism_check": "none", "debug": False, "early_stop": True}),
    "several patterns": job(trainable=["visual_projection*", "*.bias"]),
    "null where null means the default": job(**{name: None for name in ("attention", "padding", "deepspeed", "trainable", "world_size", "rank", "allocator", "zero_init", "gradient_checkpointing", "use_cache", "gpus_per_node")}),
    "fractional capacity": job(capacity_gib=23.5, host_ram_gib=64),
    "allocator options": job(allocator={"expandable_segments": True, "max_split_size_mb": 128, "garbage_collection_threshold": 0.8, "roundup_power2_divisions": {"256": 1, "512": 2, ">": 4}}),
    "trainer part": job(trainer={"bf16": True, "gradient_accumulation_steps": 4}),
    "last rank": job(world_size=8, rank=7),
    "last rank of those with samples of their own": job(world_size=8, data_parallel_size=2, rank=1),
    "schema named": job(schema=1),
    "unknown keys inside deepspeed": job(deepspeed={"wall_clock_breakdown": False, "comms_logger": {"enabled": False}}),
}


@pytest.mark.parametrize("content", GOOD.values(), ids=GOOD)
def test_a_good_job_survives_the_round_trip(content):
    setup = Setup.from_job(content)
    text = json.dumps(setup.to_job())
    again = Setup.from_job(json.loads(text))
    assert again == setup
    assert hash(again) == hash(setup)
    assert again.digest == setup.digest
    assert json.dumps(again.to_job()) == text


def test_key_order_does_not_matter_and_values_do():
    one = Setup(model="gpt2", micro_batch=8, deepspeed={"a": 1, "b": {"c": 2, "d": 3}})
    same = Setup(model="gpt2", micro_batch=8, deepspeed={"b": {"d": 3, "c": 2}, "a": 1})
    other = Setup(model="gpt2", micro_batch=8, deepspeed={"b": {"d": 3, "c": 4}, "a": 1})
    assert one == same and hash(one) == hash(same) and one.digest == same.digest
    assert one != other and one.digest != other.digest
    assert one != one.to_job()


def test_with_deepspeed_sets_removes_and_leaves_the_first_alone():
    first = Setup(model="gpt2", micro_batch=8, deepspeed={"zero_optimization": {"stage": 2}})
    offloaded = first.with_deepspeed("zero_optimization.offload_optimizer.device", "cpu")
    assert offloaded.deepspeed == {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert first.deepspeed == {"zero_optimization": {"stage": 2}}
    assert offloaded.with_deepspeed("zero_optimization.offload_optimizer", None) == first
    assert first.with_deepspeed("bf16.enabled", False).deepspeed["bf16"] == {"enabled": False}


def test_replace_checks_anew():
    setup = Setup(model="gpt2", micro_batch=8)
    assert setup.replace(micro_batch=9).micro_batch == 9
    with pytest.raises(BadInput, match="micro_batch"):
        setup.replace(micro_batch=0)


def test_a_setup_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        Setup(model="gpt2", micro_batch=8).micro_batch = 9


# --- bad jobs: what is written, the field that is named, words of the way out


BAD = {
    "unknown key, nearest named": (job(micro_bach=8), "micro_bach", 'did you mean \"micro_batch\"'),
    "unknown key, nothing near": (job(zzz=8), "zzz", "the keys are"),
    "a DeepSpeed config for a job": ({"zero_optimization": {"stage": 2}}, "zero_optimization", 'into "deepspeed" of a job'),
    "arguments for a job": ({"per_device_train_batch_size": 4}, "per_device_train_batch_size", 'into "trainer" of a job'),
    "a model's config for a job": ({"model_type": "gpt2"}, "model_type", 'into "model" of a job'),
    "no model": ({"micro_batch": 8}, "model", "required"),
    "no micro_batch": ({"model": "gpt2"}, "micro_batch", "required"),
    "null model": ({"model": None, "micro_batch": 8}, "model", "required"),
    "empty model": (job(model="  "), "model", "empty"),
    "model a number": (job(model=5), "model", "is 5; give a name"),
    "model a list": (job(model=["gpt2"]), "model", "is [\"gpt2\"]; give a name"),
    "micro_batch a text": (job(micro_batch="8"), "micro_batch", "whole number"),
    "micro_batch true": (job(micro_batch=True), "micro_batch", "whole number"),
    "micro_batch fractional": (job(micro_batch=8.5), "micro_batch", "whole number"),
    "micro_batch zero": (job(micro_batch=0), "micro_batch", "at least 1"),
    "micro_batch negative": (job(micro_batch=-3), "micro_batch", "at least 1"),
    "micro_batch absurd": (job(micro_batch=10**30), "micro_batch", "no machine"),
    "micro_batch nan": (job(micro_batch=float("nan")), "micro_batch", "whole number"),
    "micro_batch inf": (job(micro_batch=float("inf")), "micro_batch", "whole number"),
    "sequence zero": (job(sequence=0), "sequence", "at least 1"),
    "sequence a list": (job(sequence=[77]), "sequence", "whole number"),
    "target_sequence negative": (job(target_sequence=-1), "target_sequence", "at least 1"),
    "image_size a text": (job(image_size="224"), "image_size", "whole number"),
    "world_size zero": (job(world_size=0), "world_size", "at least 1"),
    "gpus_per_node negative": (job(gpus_per_node=-8), "gpus_per_node", "at least 1"),
    "rank negative": (job(world_size=8, rank=-1), "rank", "at least 0"),
    "rank beyond": (job(world_size=8, rank=8), "rank", "0 to 7"),
    "rank beyond those with samples of their own": (job(world_size=8, data_parallel_size=2, rank=2), "rank", "data_parallel_size is 2"),
    "groups that are not equal": (job(world_size=8, data_parallel_size=3), "data_parallel_size", "does not divide world_size, 8"),
    "no group": (job(data_parallel_size=0), "data_parallel_size", "at least 1"),
    "rank without a world": (job(rank=1), "rank", "world_size is 1"),
    "attention unknown": (job(attention="flash"), "attention", "flash_attention_2"),
    "attention a list": (job(attention=["sdpa"]), "attention", "choose one of"),
    "padding a text": (job(padding="true"), "padding", "true or false"),
    "use_cache a number": (job(use_cache=1), "use_cache", "true or false"),
    "zero_init a text": (job(zero_init="no"), "zero_init", "true or false"),
    "checkpointing a text": (job(gradient_checkpointing="yes"), "gradient_checkpointing", "use_reentrant"),
    "deepspeed a path": (job(deepspeed="ds.json"), "deepspeed", "give an object"),
    "deepspeed a list": (job(deepspeed=[]), "deepspeed", "give an object"),
    "trainer a list": (job(trainer=[]), "trainer", "give an object or null"),
    "lora true": (job(lora=True), "lora", "give an object or null"),
    "trainable a text": (job(trainable="*"), "trainable", "list of parameter name patterns"),
    "trainable empty": (job(trainable=[]), "trainable", "list"),
    "trainable without end": (job(trainable=["*"] * 1001), "trainable", "at most 1000"),
    "trainable of numbers": (job(trainable=[1]), "trainable", "list"),
    "gpu a number": (job(gpu=80), "gpu", "card's name"),
    "capacity zero": (job(capacity_gib=0), "capacity_gib", "above 0"),
    "capacity negative": (job(capacity_gib=-1.5), "capacity_gib", "above 0"),
    "capacity nan": (job(capacity_gib=float("nan")), "capacity_gib", "above 0"),
    "capacity inf": (job(capacity_gib=float("inf")), "capacity_gib", "above 0"),
    "capacity a text": (job(capacity_gib="80"), "capacity_gib", "above 0"),
    "host_ram true": (job(host_ram_gib=True), "host_ram_gib", "above 0"),
    "allocator option unknown": (job(allocator={"expandable_segment": True}), "allocator.expandable_segment", 'did you mean \"expandable_segments\"'),
    "expandable a text": (job(allocator={"expandable_segments": "True"}), "allocator.expandable_segments", "true or false"),
    "split too small": (job(allocator={"max_split_size_mb": 19}), "allocator.max_split_size_mb", "at least 20"),
    "threshold too large": (job(allocator={"garbage_collection_threshold": 1}), "allocator.garbage_collection_threshold", "between 0 and 1"),
    "divisions that are no power of 2": (job(allocator={"roundup_power2_divisions": 3}), "allocator.roundup_power2_divisions", "power of 2"),
    "a size that is no power of 2": (job(allocator={"roundup_power2_divisions": {"300": 2}}), "allocator.roundup_power2_divisions", "powers of 2 in MiB"),
    "split fractional": (job(allocator={"max_split_size_mb": 64.5}), "allocator.max_split_size_mb", "whole number"),
    "a newer schema": (job(schema=2), "schema", "reads schema 1"),
    "schema true": (job(schema=True), "schema", "is true; this version reads schema 1"),
    "schema a text": (job(schema="1"), "schema", 'is "1"'),
    "capacity beyond measure": (job(capacity_gib=1e300), "capacity_gib", "not in bytes"),
    "capacity in bytes": (job(capacity_gib=85899345920), "capacity_gib", "not in bytes"),
    "gpu empty": (job(gpu=" "), "gpu", "or null"),
    "checkpointing keyword misspelt": (job(gradient_checkpointing={"use_rentrant": False}), "gradient_checkpointing.use_rentrant", 'did you mean "use_reentrant"'),
    "checkpointing keyword a text": (job(gradient_checkpointing={"use_reentrant": "false"}), "gradient_checkpointing.use_reentrant", 'is "false"; give true or false'),
    "checkpointing check unknown": (job(gradient_checkpointing={"use_reentrant": False, "determinism_check": "yes"}), "gradient_checkpointing.determinism_check", "none"),
    "checkpointing debugged and reentrant": (job(gradient_checkpointing={"debug": True}), "gradient_checkpointing.debug", "use_reentrant"),
    "split without end": (job(allocator={"max_split_size_mb": 10**20}), "allocator.max_split_size_mb", "leave it out"),
    "a number for a key": ({**MINIMAL, 5: 1}, "5", "is not a key of a job"),
    "a list for a job": ([MINIMAL], "job", "JSON object"),
    "a text for a job": ("gpt2", "job", "JSON object"),
    "null for a job": (None, "job", "JSON object"),
}


@pytest.mark.parametrize(("content", "field", "words"), BAD.values(), ids=BAD)
def test_a_bad_job_is_one_sentence_that_names_the_field(content, field, words):
    with pytest.raises(BadInput) as caught:
        Setup.from_job(content)
    text = str(caught.value)
    assert caught.value.field == field
    assert text.startswith(f"{field}: ")
    assert words in text
    assert "\n" not in text and len(text) < 400


# --- files


def test_a_file_is_read(tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(FULL))
    assert Setup.from_file(path) == Setup.from_job(FULL)


BROKEN = {
    "cut short": ('{"model": "gpt2", "micro_batch": ', "line 1"),
    "a comma too many": ('{"model": "gpt2",\n "micro_batch": 8,}', "line 2"),
    "a comment": ('{"model": "gpt2" // small\n}', "line 1"),
    "empty": ("", "is empty"),
    "only spaces": (" \n ", "is empty"),
    "a key twice": ('{"model": "gpt2", "micro_batch": 8, "micro_batch": 9}', 'gives "micro_batch" twice'),
    "a key twice inside": ('{"model": "gpt2", "micro_batch": 8, "deepspeed": {"bf16": {"enabled": true, "enabled": false}}}', 'gives "enabled" twice'),
    "nested past reason": ("[" * 100_000, "nested too deeply"),
    "only a number": ("8", "is 8; give a JSON object"),
    "only null": ("null", "is null; give a JSON object"),
}


@pytest.mark.parametrize(("text", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_says_where(text, words, tmp_path):
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        Setup.from_file(path)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_missing_file_a_folder_and_bytes(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00{}")
    for path, words in (("x" * 5000, "too long"), ("a\0b", "null byte"), (tmp_path / "none.json", "No such file"), (tmp_path, "directory"), (tmp_path / "bytes.json", "UTF-8")):
        with pytest.raises(BadInput, match=words):
            Setup.from_file(path)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["micro_batch", "capacity_gib", "sequence"])
def test_numbers_that_are_none_are_refused(literal, field):
    content = {**MINIMAL, **parse_json(f'{{"{field}": {literal}}}', "job")}
    with pytest.raises(BadInput, match=field):
        Setup.from_job(content)


def test_numbers_that_are_none_are_refused_inside_deepspeed_too():
    """They have no form in JSON: another reader of the job would fail on them."""
    with pytest.raises(BadInput, match="deepspeed"):
        Setup.from_job(job(deepspeed={"gradient_clipping": float("nan")}))


def test_deep_nesting_inside_a_job_is_bad_input():
    inner: dict = {}
    for _ in range(50_000):
        inner = {"a": inner}
    with pytest.raises(BadInput, match="nested too deeply"):
        Setup.from_job(job(deepspeed=inner))


def test_an_integer_of_many_digits_is_bad_input():
    with pytest.raises(BadInput, match="job"):
        parse_json('{"micro_batch": ' + "9" * 10_000 + "}", "job")


def test_ten_megabytes_are_refused_quickly(tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job(deepspeed={"pad": "x" * 10_000_000})))
    with pytest.raises(BadInput, match="too large"):
        Setup.from_file(path)
    with pytest.raises(BadInput, match="too large"):
        Setup.from_job(json.loads(path.read_text()))


def test_values_without_a_json_form_are_refused():
    with pytest.raises(BadInput, match="object"):
        Setup(model="gpt2", micro_batch=8, deepspeed={"x": object()})


def test_a_nest_without_end_is_refused():
    nest: dict = {"a": {}}
    nest["a"]["a"] = nest
    for name in ("model", "deepspeed", "trainer", "lora"):
        with pytest.raises(BadInput, match="nested too deeply") as caught:
            Setup(**{"model": "gpt2", "micro_batch": 8, name: nest})
        assert caught.value.field == name


# --- Python's own forms


def test_what_a_setup_is_given_is_copied():
    import copy
    import pickle

    section = {"zero_optimization": {"stage": 2}}
    setup = Setup(model="gpt2", micro_batch=8, deepspeed=section)
    digest = setup.digest
    section["zero_optimization"]["stage"] = 3
    setup.to_job()["deepspeed"]["zero_optimization"]["stage"] = 1
    assert setup.deepspeed == {"zero_optimization": {"stage": 2}} and setup.replace().digest == digest
    for other in (copy.copy(setup), copy.deepcopy(setup), pickle.loads(pickle.dumps(setup)), Setup.from_job(setup.to_job())):
        assert other == setup and hash(other) == hash(setup)


def test_numpys_numbers_paths_and_other_mappings_are_taken():
    from collections import OrderedDict
    from pathlib import Path
    from types import MappingProxyType

    import numpy as np

    setup = Setup(
        model=Path("models") / "config.json", micro_batch=np.int64(8), sequence=np.uint16(77), padding=np.bool_(True), capacity_gib=np.float32(40), trainable=["*.bias"],
        gradient_checkpointing=OrderedDict(use_reentrant=np.False_), trainer=MappingProxyType({"learning_rate": np.float64(1e-5)}),
        deepspeed={"zero_optimization": MappingProxyType({"stage": np.int8(2), "offload_param": {"nvme_path": Path("/data")}}), "optimizer": {"params": {"betas": (0.9, 0.99)}}, 7: None},
    )
    assert setup == Setup(
        model="models/config.json", micro_batch=8, sequence=77, padding=True, capacity_gib=40.0, trainable=("*.bias",), gradient_checkpointing={"use_reentrant": False}, trainer={"learning_rate": 1e-5},
        deepspeed={"zero_optimization": {"stage": 2, "offload_param": {"nvme_path": "/data"}}, "optimizer": {"params": {"betas": [0.9, 0.99]}}, "7": None},
    )
    assert type(setup.micro_batch) is int and type(setup.padding) is bool and type(setup.deepspeed["zero_optimization"]["stage"]) is int


@pytest.mark.parametrize("value", [object(), b"x", 1j, {("a", 1): 2}, float("inf")], ids=lambda value: type(value).__name__)
def test_what_json_has_no_form_for(value):
    with pytest.raises(BadInput, match="deepspeed: .*JSON has no form for"):
        Setup(model="gpt2", micro_batch=8, deepspeed={"x": value})


def test_checkpointing_without_the_keyword_is_torchs_default():
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    with pytest.warns(UserWarning, match="use_reentrant"):
        result = checkpoint(torch.sin, torch.ones(1, requires_grad=True))
    assert type(result.grad_fn).__name__ == "CheckpointFunctionBackward"  # the reentrant kind
    assert Setup(model="gpt2", micro_batch=8, gradient_checkpointing={}).gradient_checkpointing == {"use_reentrant": True}


def test_with_deepspeed_writes_over_what_is_no_object():
    assert Setup(model="gpt2", micro_batch=8, deepspeed={"zero_optimization": True}).with_deepspeed("zero_optimization.stage", 2).deepspeed == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize("name", ["micro_batch", "sequence", "world_size", "gpus_per_node"])
def test_a_whole_float_is_an_integer(name):
    given = Setup.from_job({**MINIMAL, name: 4.0})
    assert getattr(given, name) == 4 and isinstance(getattr(given, name), int)
    assert given == Setup.from_job({**MINIMAL, name: 4})
    with pytest.raises(BadInput, match=name):
        Setup.from_job({**MINIMAL, name: 4.5})
