"""Measure llguidance and xgrammar on a CPU: how long a grammar takes to compile, and a batch of masks to be made.

usage: bench_grammars.py [--vocab 151936] [--batches 1 64 256 1024] [--schemas 20] [--threads N] [--tokenizer FILE]

Both libraries get the same schemas, the same vocabulary and the same answers (JSON that the schemas allow, token by
token), and make masks for whole batches at a time, on their own threads. Without `--tokenizer` (a tokenizer.json) the
vocabulary is made of the most frequent words in the Python files of this environment, as long as a real one. xgrammar
is measured if it is installed: `pip install xgrammar`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import sysconfig
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

END_ID = 0
_WORD = re.compile(r" ?[^\W\d_]{1,20}| ?\d| ?[^\s\w]{1,4}|\s{1,16}")
_MAX_CHARS = 30_000_000


def make_vocabulary(size: int) -> str:
    """Return the text of a tokenizer.json with `size` tokens: all bytes, and the most frequent words of some text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    counts: collections.Counter[str] = collections.Counter()
    num_chars = 0
    for file in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = file.read_text(errors="ignore")
        counts.update(_WORD.findall(text))
        num_chars += len(text)
        if num_chars > _MAX_CHARS:
            break
    words = (level.pre_tokenize_str(word)[0][0] for word, _ in counts.most_common())
    tokens = dict.fromkeys(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *words])
    rng, common = random.Random(0), [word.strip() for word in list(counts)[:5000] if word.strip()]
    while len(tokens) < size:  # two words in one, as long vocabularies have
        tokens[level.pre_tokenize_str("".join(rng.choices(common, k=2)))[0][0]] = None
    vocab = {token: number for number, token in enumerate(list(tokens)[:size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer.to_str()


def make_schemas(count: int) -> list[tuple[dict[str, Any], str]]:
    """Return schemas of the size that people write, each with an answer that it allows."""
    rng = random.Random(1)
    found = []
    for number in range(count):
        names = [f"field_{number}_{i}" for i in range(rng.randint(4, 10))]
        properties: dict[str, Any] = {}
        answer: dict[str, Any] = {}
        for name in names:
            kind = rng.choice(("string", "integer", "enum", "array", "object", "number", "pattern"))
            if kind == "string":
                properties[name] = {"type": "string"}
                answer[name] = "some words that answer the question, and a few more"
            elif kind == "integer":
                properties[name], answer[name] = {"type": "integer", "minimum": 0, "maximum": 10_000}, 1234
            elif kind == "number":
                properties[name], answer[name] = {"type": "number"}, 3.25
            elif kind == "enum":
                properties[name], answer[name] = {"enum": [f"{name} {i}" for i in range(12)]}, f"{name} 7"
            elif kind == "pattern":
                properties[name] = {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}
                answer[name] = "AB-1234"
            elif kind == "array":
                properties[name] = {"type": "array", "items": {"type": "string"}, "maxItems": 8}
                answer[name] = ["first thing", "second thing", "third"]
            else:
                inner = {"type": "object", "properties": {"x": {"type": "boolean"}, "y": {"type": "string"}}}
                properties[name] = {**inner, "required": ["x", "y"], "additionalProperties": False}
                answer[name] = {"x": True, "y": "yes"}
        schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
        found.append((schema, json.dumps(answer)))
    return found


class LLGuidance:
    """Masks by llguidance."""

    def __init__(self, tokenizer_json: str, vocab_size: int, num_threads: int) -> None:
        from llguidance import LLExecutor, LLMatcher, LLTokenizer

        self.tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=END_ID)
        self._matcher, self._executor = LLMatcher, LLExecutor(num_threads)
        self._masks = np.zeros((1, 1), dtype=np.int32)

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.greedy_tokenize(text)

    def compile(self, schema: dict[str, Any]) -> Any:
        matcher = self._matcher(self.tokenizer, self._matcher.grammar_from_json_schema(schema), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def matcher(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def accept(self, matchers: Sequence[Any], tokens: Sequence[int]) -> None:
        assert all(self._executor.consume_token_par(list(zip(matchers, tokens, strict=True))))

    def fill(self, matchers: Sequence[Any], masks: np.ndarray) -> None:
        rows = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, 4 * masks.shape[1], len(rows))


class XGrammar:
    """Masks by xgrammar."""

    def __init__(self, tokenizer_json: str, vocab_size: int, num_threads: int) -> None:
        import xgrammar
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        self._xgrammar = xgrammar
        wrapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json))
        info = xgrammar.TokenizerInfo.from_huggingface(wrapped, vocab_size=vocab_size, stop_token_ids=[END_ID])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=num_threads, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=num_threads)

    def compile(self, schema: dict[str, Any]) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema))

    def matcher(self, compiled: Any) -> Any:
        return self._xgrammar.GrammarMatcher(compiled)

    def accept(self, matchers: Sequence[Any], tokens: Sequence[int]) -> None:
        assert all(self._batch.batch_accept_token(list(matchers), list(tokens)))

    def fill(self, matchers: Sequence[Any], masks: np.ndarray) -> None:
        import torch

        self._batch.batch_fill_next_token_bitmask(list(matchers), torch.from_numpy(masks))


def steps(
    library: Any, compiled: Sequence[Any], answers: Sequence[list[int]], batch: int, words: int
) -> Iterator[tuple[float, float, float]]:
    """Yield, for each token of a batch of answers, the seconds and the CPU seconds of its masks, and the seconds of
    taking its tokens in."""
    matchers = [library.matcher(compiled[row % len(compiled)]) for row in range(batch)]
    masks = np.zeros((batch, words), dtype=np.int32)
    for at in range(min(map(len, answers))):
        started, cpu_started = time.perf_counter(), time.process_time()
        library.fill(matchers, masks)
        filled, cpu_filled = time.perf_counter(), time.process_time()
        library.accept(matchers, [answers[row % len(answers)][at] for row in range(batch)])
        yield filled - started, cpu_filled - cpu_started, time.perf_counter() - filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--schemas", type=int, default=20)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokenizer", type=Path)
    options = parser.parse_args()
    text = options.tokenizer.read_text() if options.tokenizer else make_vocabulary(options.vocab)
    schemas = make_schemas(options.schemas)
    words = -(-options.vocab // 32)
    tokens_of = LLGuidance(text, options.vocab, 1)
    answers = [tokens_of.tokens(answer) for _, answer in schemas]
    libraries = {"llguidance": LLGuidance, "xgrammar": XGrammar}
    for name, make in libraries.items():
        if find_spec(name) is None:
            print(f"{name}: not installed")
            continue
        started = time.perf_counter()
        library = make(text, options.vocab, options.threads)
        loading = time.perf_counter() - started
        print(f"{name}: vocabulary of {options.vocab:,} in {loading:.2f} s, {options.threads} threads")
        compiled, compiling = [], []
        for schema, _ in schemas:
            started = time.process_time()
            compiled.append(library.compile(schema))
            compiling.append(time.process_time() - started)
        usual, longest = 1e3 * median(compiling), 1e3 * max(compiling)
        print(f"  compile a schema, CPU time: median {usual:.2f} ms, longest {longest:.2f} ms")
        for batch in options.batches:
            filling, busy, taking = zip(*steps(library, compiled, answers, batch, words), strict=True)
            print(
                f"  batch {batch:>5}: masks {1e3 * median(filling):.3f} ms (median; mean "
                f"{1e3 * sum(filling) / len(filling):.3f}, longest {1e3 * max(filling):.1f}), "
                f"{1e6 * sum(busy) / len(busy) / batch:.0f} us of a core for each; tokens taken in "
                f"{1e3 * median(taking):.3f} ms"
            )


if __name__ == "__main__":
    main()
