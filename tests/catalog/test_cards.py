"""GPU cards: names in any writing, capacities as PyTorch shows them, kernels by generation."""

from __future__ import annotations

import pytest

from explorer.catalog import cards, find_card
from explorer.errors import BadInput
from explorer.units import GiB, KiB, MiB


def test_all_cards_of_the_catalog_smallest_first():
    totals = [card.total_bytes for card in cards()]
    assert totals == sorted(totals) and all(isinstance(total, int) for total in totals)
    assert len({card.name for card in cards()}) == len(cards()) >= 50


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.name)
def test_no_two_cards_answer_to_one_name(card):
    for name in (card.name, *card.names):
        assert find_card(name) == find_card(name.lower().replace(" ", "-")) == card


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.name)
def test_a_capacity_is_a_little_less_than_the_label(card):
    # Vendors' gigabytes are 2^30 bytes on most cards; B300's 288 GB and GH200's 96 GB are not, and ECC takes a part.
    assert 0.9 * card.advertised * 10**9 < card.total_bytes < card.advertised * GiB


@pytest.mark.parametrize("written", ["A100-80GB", "a100-80gb", "A100 80GB", "a10080gb", "NVIDIA A100-80GB", " a100_80GB "])
def test_any_writing(written):
    assert find_card(written).name == "A100-80GB"


@pytest.mark.parametrize(
    ("written", "card"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA A100-PCIE-40GB", "A100-40GB"), ("NVIDIA A100 80GB PCIe", "A100-80GB"), ("NVIDIA H100 80GB HBM3", "H100-80GB"), ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"), ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA L4", "L4"), ("NVIDIA L40S", "L40S"), ("AMD Instinct MI300X OAM", "MI300X"),
        ("NVIDIA GB200", "GB200"), ("NVIDIA A10G", "A10G"), ("NVIDIA RTX A6000", "RTX A6000"), ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"), ("NVIDIA GeForce RTX 3060", "RTX 3060 12GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"), ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("NVIDIA H100 NVL", "H100 NVL"), ("NVIDIA H100 PCIe", "H100-80GB"), ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA A800-SXM4-80GB", "A800-80GB"), ("AMD Instinct MI250X", "MI250X"), ("AMD Instinct MI325X", "MI325X"), ("NVIDIA GeForce RTX 5090", "RTX 5090"),
    ],
)
def test_a_card_by_what_its_driver_calls_it(written, card):
    assert find_card(written).name == card


@pytest.mark.parametrize(
    ("typed", "card"),
    [
        ("A800", "A800-80GB"), ("A800-80", "A800-80GB"), ("A800-40", "A800-40GB"), ("4090", "RTX 4090"), ("rtx4090", "RTX 4090"), ("RTX 4090 24GB", "RTX 4090"), ("2080ti", "RTX 2080 Ti"),
        ("RTX 3060 12 GB", "RTX 3060 12GB"), ("3060", "RTX 3060 12GB"), ("RTX 4060 8 GB", "RTX 4060 8GB"), ("a6000", "RTX A6000"), ("A40", "A40"), ("h20", "H20"), ("L20", "L20"), ("5090", "RTX 5090"),
        ("rtx pro 6000", "RTX PRO 6000"), ("gb200", "GB200"), ("MI250X", "MI250X"), ("mi325x", "MI325X"), ("H100", "H100-80GB"), ("H100 94GB", "H100 NVL"), ("a100 80g", "A100-80GB"), ("A100 80", "A100-80GB"),
        ("v100-32", "V100-32GB"), ("L40S 48GB", "L40S"), ("RTX 4070 Ti SUPER", "RTX 4080"),
    ],
)
def test_a_card_as_people_type_it(typed, card):
    assert find_card(typed).name == card


@pytest.mark.parametrize("written", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "RTX 4090 48GB", "A100-SXM-64GB", "RTX 3080 12GB", "H100-96GB", "NVIDIA H20-3e", "RTX 6000"])
def test_another_memory_under_a_like_name_is_another_card(written):
    with pytest.raises(BadInput, match="is not a known card"):
        find_card(written)


@pytest.mark.parametrize(("name", "generation", "workspace"), [
    ("T4", "older", 8 * MiB + 128 * KiB), ("V100-16GB", "older", 8 * MiB + 128 * KiB), ("A100-40GB", "ampere", 8 * MiB + 128 * KiB),
    ("L4", "ampere", 8 * MiB + 128 * KiB), ("H100-80GB", "hopper", 32 * MiB), ("H200", "hopper", 32 * MiB), ("B200", "hopper", 32 * MiB), ("MI300X", "ampere", 128 * MiB), ("MI250X", "ampere", 32 * MiB),
    ("RTX 5090", "ampere", 8 * MiB + 128 * KiB), ("RTX PRO 6000", "ampere", 8 * MiB + 128 * KiB), ("B300", "hopper", 32 * MiB), ("RTX 2080 Ti", "older", 8 * MiB + 128 * KiB),
])
def test_kernels_and_workspaces(name, generation, workspace):
    card = find_card(name)
    assert (card.attention_generation, card.cublas_workspace_bytes) == (generation, workspace)


@pytest.mark.parametrize(("name", "words"), [("A100", "A100-40GB"), ("K80", "A100-80GB"), ("Z9000", "capacity_gib"), ("", "capacity_gib"), ("gpu" * 200, "capacity_gib")])
def test_an_unknown_card_is_one_sentence_with_names(name, words):
    with pytest.raises(BadInput) as caught:
        find_card(name)
    assert caught.value.field == "gpu" and words in str(caught.value)


def test_each_number_says_where_it_comes_from():
    assert all(card.source and card.outside_source for card in cards())


@pytest.mark.parametrize(("name", "offered"), [("A100", "A100-40GB, A100-80GB"), ("V100", "V100-16GB, V100-32GB"), ("H100-96GB", "H100-80GB, H100 NVL"), ("A1O0-80GB", "A100-80GB, H100-80GB, A800-80GB"), ("48GB", "A40, L20, L40, L40S, RTX 6000 Ada, RTX A6000, Quadro RTX 8000"), ("RTX 6000", "RTX 6000 Ada, RTX PRO 6000")])
def test_names_offered_are_of_that_card_and_the_smaller_comes_first(name, offered):
    with pytest.raises(BadInput, match=f"choose one of {offered}[,] or give"):
        find_card(name)
