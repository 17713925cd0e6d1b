"""PYTORCH_CUDA_ALLOC_CONF: what is read of it, what PyTorch itself would say, and what is written."""

from __future__ import annotations

import subprocess
import sys

import pytest

from explorer.allocator_options import KNOWN, check, divisions, read, written
from explorer.errors import BadInput

READ = {
    "expandable_segments:True": {"expandable_segments": True},
    "expandable_segments:true": {"expandable_segments": True},
    "expandable_segments:False": {},
    " max_split_size_mb: 64 , expandable_segments:True": {"max_split_size_mb": 64, "expandable_segments": True},
    "'garbage_collection_threshold:0.6,max_split_size_mb:128'": {"garbage_collection_threshold": 0.6, "max_split_size_mb": 128},
    "roundup_power2_divisions:4": {"roundup_power2_divisions": 4},
    "roundup_power2_divisions:[256:1,512:2,>:4],max_split_size_mb:32": {"roundup_power2_divisions": {"256": 1, "512": 2, ">": 4}, "max_split_size_mb": 32},
    "max_split_size_mb:64,roundup_power2_divisions:[64:8,128:2]": {"max_split_size_mb": 64, "roundup_power2_divisions": {"64": 8, "128": 2}},
    "backend:cudaMallocAsync": {},
    "max_split_size_mb:64,": {"max_split_size_mb": 64},
    "": {},
}


@pytest.mark.parametrize("text", READ)
def test_what_is_read(text):
    assert read(text).options == READ[text]
    assert read(text).refused == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_split_size_mb:10", "max_split_size_mb: is 10"),
        ("max_split_size_mb:big", "whole number of at least 20"),
        ("max_split_size_mb", "whole number"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("roundup_power2_divisions:3", "power of 2"),
        ("roundup_power2_divisions:0", "power of 2"),
        ("roundup_power2_divisions:[300:2]", "sizes are powers of 2"),
        ("expandable_segments:yes", "give true or false"),
        ("expandable_segment:True", 'did you mean "expandable_segments"'),
        ("a:b", "is not an option"),
        ("[[[,:,]]:", "is not an option"),
        ("garbage_collection_threshold:nan", "between 0 and 1"),
        ("garbage_collection_threshold:1e400", "between 0 and 1"),
    ],
)
def test_what_pytorch_would_refuse_is_told_and_the_rest_is_read(text, words):
    found = read(f"{text},max_split_size_mb:256" if "[[[" not in text else text)
    assert any(words in sentence for sentence in found.refused)
    assert "[[[" in text or found.options.get("max_split_size_mb") == 256


def test_other_options_of_pytorch_are_named_and_left_out():
    found = read("backend:native,pinned_use_background_threads:True,max_split_size_mb:64")
    assert (found.options, found.ignored) == ({"max_split_size_mb": 64}, ("backend", "pinned_use_background_threads"))


@pytest.mark.parametrize("options", [o for o in READ.values() if o], ids=str)
def test_what_is_written_reads_back(options):
    assert read(written(options)).options == options


def test_nothing_is_written_of_defaults():
    assert written({"expandable_segments": False, "max_split_size_mb": None}) == ""


def test_a_list_is_written_by_size():
    assert written({"roundup_power2_divisions": {">": 4, "512": 2, "256": 1}}) == "roundup_power2_divisions:[256:1,512:2,>:4]"


@pytest.mark.parametrize(
    ("asked", "of_sizes"),
    [
        ({"64": 8, "128": 2, "256": 4, "512": 2, "1024": 4, ">": 1}, {32: 8, 64: 8, 128: 2, 256: 4, 512: 2, 1024: 4, 2048: 1, 4096: 1, 8192: 1}),
        ({"128": 8, "256": 16, "512": 1, "2048": 8, ">": 2}, {64: 8, 128: 8, 256: 16, 512: 1, 1024: 0, 2048: 8, 4096: 2}),
        (4, {64: 4, 256: 4, 2048: 4}),
    ],
)
def test_the_divisions_of_each_size_are_those_of_pytorchs_own_test(asked, of_sizes):
    """c10/test/core/AllocatorConfig_test.cpp has these three settings and these values."""
    found = divisions(asked)
    assert {size: found[size.bit_length() - 1] for size in of_sizes} == of_sizes


REFUSED_BY_BOTH = ["max_split_size_mb:19", "garbage_collection_threshold:1", "garbage_collection_threshold:0", "roundup_power2_divisions:3", "roundup_power2_divisions:0", "roundup_power2_divisions:[256:3]"]
TAKEN_BY_BOTH = ["max_split_size_mb:20", "garbage_collection_threshold:0.5", "roundup_power2_divisions:8", "roundup_power2_divisions:[256:0,512:2,>:4]", "expandable_segments:True,max_split_size_mb:64"]


def test_the_installed_pytorch_takes_and_refuses_the_same():
    pytest.importorskip("torch")
    code = (
        "import sys, torch\n"
        "for text in sys.argv[1:]:\n"
        "    try: torch._C._accelerator_setAllocatorSettings(text); print('taken')\n"
        "    except Exception: print('refused')\n"
    )
    texts = [*REFUSED_BY_BOTH, *TAKEN_BY_BOTH]
    done = subprocess.run([sys.executable, "-c", code, *texts], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused" if read(text).refused else "taken" for text in texts]
    assert all(read(text).refused for text in REFUSED_BY_BOTH)


@pytest.mark.parametrize("name", KNOWN)
def test_a_value_of_another_type_is_bad_input_that_names_the_option(name):
    with pytest.raises(BadInput, match=rf"allocator\.{name}"):
        check({name: ["a"]})
