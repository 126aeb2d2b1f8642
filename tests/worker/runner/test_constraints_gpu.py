"""Answers that follow grammars on a GPU, where masks are made while a graph runs: complete, and as without graphs.

Graphs are captured anew in two parts after their first steps.
"""

from __future__ import annotations

import pytest
from late_masks import use_late_masks

from constrained_requests import assert_follow_grammars, load_vocabulary, make_requests, run_here
from late_worker import LateMasks
from nvcli.worker.runner import masked_choice

pytestmark = pytest.mark.gpu


def test_answers_are_complete_and_graphs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_choice, "_STEPS_BEFORE", 1)
    vocabulary = load_vocabulary()
    requests = make_requests(vocabulary)
    found, _ = run_here(requests, device="cuda", max_num_seqs=40)
    assert_follow_grammars(requests, found, vocabulary)
    eager, _ = run_here(requests, device="cuda", max_num_seqs=40, enforce_eager=True)
    num_equal = sum(eager[number] == answer for number, answer in found.items())
    assert num_equal >= 0.8 * len(found)  # other shapes of products may tip a sampled token


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_rows_that_are_held_have_the_same_answers(enforce_eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, where the bits of a row do not depend on the batch."""
    monkeypatch.setattr(masked_choice, "_STEPS_BEFORE", 1)
    requests = make_requests(load_vocabulary())
    config = {"device": "cuda", "max_num_seqs": 40, "batch_invariant": True, "enforce_eager": enforce_eager}
    expected, _ = run_here(requests, **config)
    late = use_late_masks(monkeypatch, LateMasks(share=0.3, seconds=0.004))
    found, _ = run_here(requests, **config)
    assert found == expected
    assert late.num_held > 20
