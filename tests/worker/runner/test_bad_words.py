"""Bad words and allowed tokens: forbidden on the device, by the tokens that are there, and gone with their request."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from fake_runners import engine_config
from nvcli.core.messages import FORBIDDEN, NewSlot
from nvcli.core.sampling_params import SamplingParams
from nvcli.demo import demo_path
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from nvcli.worker.runner.sampler import Sampler
from nvcli.worker.runner.slot_table import SlotTable
from one_rank import make_runner, make_scheduler, run_requests
from requests_factory import make_request
from slot_sampling import slot_sampling

VOCAB, LEN = 6, 12
CPU = torch.device("cpu")


def completes(word: list[int], tokens: list[int], prompt_len: int) -> int | None:
    """The token that would complete a word behind an answer; None if none does."""
    answer = tokens[prompt_len:]
    begun = word[:-1]
    return word[-1] if len(answer) >= len(begun) and answer[len(answer) - len(begun) :] == begun else None


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(5))
def test_the_token_that_completes_a_word_is_forbidden_and_no_other(seed: int, device: str) -> None:
    rng = random.Random(seed)
    num_slots = 6
    table = SlotTable(engine_config(max_num_seqs=num_slots), 1, torch.device(device))
    sampler = Sampler(table, TensorParallelGroup.single(), VOCAB)
    for _ in range(8):  # slots are filled again, and the table grows meanwhile
        kinds: list[dict[str, Any]] = []
        for _ in range(num_slots):
            words = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 5))] for _ in range(rng.randrange(5))]
            allowed = rng.sample(range(VOCAB), rng.randint(1, VOCAB)) if rng.random() < 0.4 else []
            bias = {rng.randrange(VOCAB): 0.5} if rng.random() < 0.5 else {}
            kinds.append(
                {"bad_words": words, "allowed_ids": allowed, "bias_ids": [*bias], "bias_values": [*bias.values()]}
            )
        new = [
            NewSlot(slot=i, num_cached_tokens=0, sampling=slot_sampling(i, temperature=0.0, **kind))
            for i, kind in enumerate(kinds)
        ]
        table.sampling.fill(new, table.upload)
        tokens = [[rng.randrange(VOCAB) for _ in range(LEN)] for _ in range(num_slots)]
        table.state.token_ids[:num_slots, :LEN] = torch.tensor(tokens, dtype=torch.int32)
        order = rng.sample(range(num_slots), num_slots)
        lengths = [rng.randint(3, rng.choice((5, LEN))) for _ in order]  # many are just behind the prompt
        logits = torch.randn(num_slots, VOCAB)
        expected = logits.clone()
        for row, (slot, length) in enumerate(zip(order, lengths, strict=True)):
            kind = kinds[slot]
            for token, value in zip(kind["bias_ids"], kind["bias_values"], strict=True):
                expected[row, token] += value
            for word in kind["bad_words"]:
                token = completes(word, tokens[slot][:length], 3)
                if token is not None:
                    expected[row, token] += FORBIDDEN
            if kind["allowed_ids"]:
                expected[row, [token for token in range(VOCAB) if token not in kind["allowed_ids"]]] = -torch.inf
        slots = torch.tensor(order, device=device)
        needs = sampler.needs(slots.cpu().numpy())
        assert needs.is_simple == all(not any(kind.values()) for kind in kinds)
        positions = torch.tensor(lengths, dtype=torch.int32, device=device)
        ids, _ = sampler.sample_fully(logits.to(device), slots, positions, needs)
        assert ids.tolist() == expected.argmax(dim=-1).tolist()


def test_a_batch_without_them_takes_no_memory_for_them() -> None:
    table = SlotTable(engine_config(max_num_seqs=4), 1, CPU).sampling
    assert table.bad_words._table.numel() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_answers_of_the_built_in_model_keep_to_the_rules(device: str) -> None:
    """Together with rows that have none, and after preemptions, when cached tokens are not computed again."""
    size = 4 if device == "cpu" else 16
    runner = make_runner(demo_path(), device, dtype="float32", max_model_len=128, max_num_seqs=4, block_size=size)
    tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]

    prompt = ids("What is 37 + 58?\n")
    digits = [ids(str(digit))[0] for digit in range(10)]
    plain = SamplingParams(temperature=0)
    requests = [
        make_request(0, prompt, 8, sampling=plain, stop_ids=ids("<|endoftext|>")),
        make_request(1, prompt, 8, sampling=plain, bad_words=[ids("95")]),
        make_request(2, prompt, 8, sampling=plain, bad_words=[ids("58")]),  # the prompt does not count
        make_request(3, prompt, 8, sampling=SamplingParams(temperature=1, allowed_token_ids=digits[:3])),
        make_request(4, prompt, 8, sampling=plain, forbidden_ids=ids("9")),
    ]
    answers = {number: tokenizer.decode(tokens) for number, tokens in run_requests(runner, requests).items()}
    assert answers[0] == "95"
    assert answers[1].startswith("9")
    assert "95" not in answers[1]
    assert answers[2].startswith("95")
    assert set(answers[3]) <= set("012")
    assert len(answers[3]) == 8
    assert "9" not in answers[4]

    zero, one = digits[:2]
    sampling = SamplingParams(temperature=1, allowed_token_ids=[zero, one], logit_bias={zero: 0.0, one: 3.0})
    words = [[zero] * 4, [one] * 4]
    digit_rows = [make_request(i, prompt, 24, sampling=sampling, bad_words=words) for i in range(6)]
    roomy = run_requests(runner, digit_rows)
    scheduler = make_scheduler(runner, num_blocks=56 // size)  # not for two of them
    tight = run_requests(runner, digit_rows, scheduler)
    assert scheduler.stats.num_preemptions > 0
    assert tight == roomy
    texts = [tokenizer.decode(tokens) for tokens in tight.values()]
    assert all("111" in text and "0000" not in text and "1111" not in text for text in texts)
