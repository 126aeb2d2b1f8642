"""Makes input rows as structures, native and OpenAI ones, good and bad; mutates keys, values, spellings and bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from fuzzing import load_data
from row_oracle import CHAT, COMPLETION, JobFacts

VOCAB_SIZE = 640
"""The vocabulary of the built-in model."""


class Verbatim(str):
    """JSON text that stands for itself."""


DATA = load_data("rows")
TEXTS = (*DATA["texts"], "x" * 300)
SPELLED = (*DATA["spelled"], "9" * 500, "9" * 5000)
LARGE = ("[" + "{}," * 10_000 + "{}]", '"' + "y" * 100_000 + '"', '"' + "\\n[" * 3000 + '"')
SAMPLING: dict[str, list[Any]] = DATA["sampling"]
"""Values of each key; the first ones are sound."""


class RowMaker:
    """Makes mutated rows. What they mean is for the oracle to say."""

    def __init__(self, rng: random.Random, facts: JobFacts) -> None:
        self._rng = rng
        self._facts = facts

    def lines(self, count: int) -> Iterator[bytes]:
        """Yield so many lines, some of them blank."""
        rng = self._rng
        for number in range(count):
            if rng.random() < 0.03:
                yield rng.choice(
                    [b"", b" \t", b"\r", b"\xef\xbb\xbf", b"null", b"[]", b'"text"', b"3", b"{}", b"[[1]]"]
                )
                continue
            line = self._spell(self._row(number)).encode(errors="surrogatepass")
            if rng.random() < 0.04:
                line = self._mutate_bytes(line)
            yield line + rng.choice([b"", b"", b"", b"\r", b"  "])

    def _row(self, number: int) -> Any:
        rng = self._rng
        pairs = self._openai(number) if rng.random() < 0.35 else self._native(number)
        for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 1, 2))):
            self._mutate(pairs)
        return pairs

    def _native(self, number: int) -> list[tuple[str, Any]]:
        rng, facts = self._rng, self._facts
        kind = rng.randrange(5)
        pairs: list[tuple[str, Any]] = []
        if kind < 2:
            pairs.append((facts.prompt_key, self._prompt()))
        elif kind < 4:
            pairs.append((facts.messages_key, self._messages()))
        else:
            pairs.append(
                ("prompt_token_ids", [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 3, 30, 90, 300)))])
            )
        if rng.random() < 0.7:
            pairs.append((facts.id_key, self._id(number)))
        if rng.random() < 0.5:
            pairs.append(("sampling", self._sampling([*SAMPLING])))
        if (kind in (2, 3) and rng.random() < 0.2) or rng.random() < 0.02:
            pairs.append(("chat_template_kwargs", self._variables()))
        if rng.random() < 0.3:
            pairs.append((rng.choice(("topic", "topic", "", "ü", "url", "body", "custom_id")), self._value()))
        rng.shuffle(pairs)
        return pairs

    def _openai(self, number: int) -> list[tuple[str, Any]]:
        rng = self._rng
        url = rng.choice((CHAT, COMPLETION))
        names = [name for name in SAMPLING if name not in ("return_token_ids", "logprobs", "structured")]
        body: list[tuple[str, Any]] = [*self._sampling(names)] if rng.random() < 0.7 else []
        body.append(("model", "m"))
        if url == CHAT:
            body.append(("messages", self._messages()))
            if rng.random() < 0.2:
                body.append(("chat_template_kwargs", self._variables()))
            if rng.random() < 0.2:
                body += [("logprobs", rng.choice((True, False, 1))), ("top_logprobs", rng.choice((None, 0, 3, 20, 21)))]
            if rng.random() < 0.2:
                body.append(("max_completion_tokens", rng.choice((8, 3, None, 0))))
        else:
            odd = ([1, 2, 3], [self._prompt()], [[4, 5]], ["a", "b"], [], [[]])
            prompt = self._prompt() if rng.random() < 0.7 else rng.choice(odd)
            body.append(("prompt", prompt))
        if rng.random() < 0.1:
            extra = rng.choice(("user", "metadata", "store", "stream", "tools", "response_format", "echoes", "audio"))
            body.append((extra, rng.choice((None, False, [], {"type": "text"}, True, [{}], "x"))))
        pairs: list[tuple[str, Any]] = [("custom_id", f"c{number}" if rng.random() < 0.9 else self._id(number))]
        pairs += [("method", "POST"), ("url", url), ("body", body)]
        return pairs

    def _prompt(self) -> str:
        rng = self._rng
        if rng.random() < 0.5:
            return f"What is {rng.randrange(50)} + {rng.randrange(50)}?"
        return rng.choice(TEXTS) * rng.choice((1, 1, 1, 5))

    def _messages(self) -> list[Any]:
        rng = self._rng
        messages: list[Any] = [{"role": rng.choice(("user", "system", "")), "content": self._prompt()}]
        if rng.random() < 0.2:
            odd = (
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": self._prompt()}]},
                {"role": "user", "content": [], "name": "n"},
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "assistant", "content": None},
                {"role": 1, "content": "a"},
                {"content": "a"},
                {"role": "user", "content": [{"type": "image_url"}]},
                {"role": "user", "content": 3},
                "a",
            )
            messages.append(rng.choice(odd))
        return messages

    def _sampling(self, names: Sequence[str]) -> list[tuple[str, Any]]:
        rng = self._rng
        chosen = rng.sample(names, rng.choice((0, 1, 1, 2, 3, 6)))
        # The first values of each key are sound ones.
        return [(name, SAMPLING[name][int(len(SAMPLING[name]) * rng.random() ** 4)]) for name in chosen]

    def _id(self, number: int) -> Any:
        rng = self._rng
        if rng.random() < 0.85:
            return f"r{number}"
        names = f"row-{rng.randrange(500)}", f"row-{number + rng.randrange(3)}", f"row-{number}-2"
        return rng.choice((f"r{rng.randrange(100)}", number + 1, rng.randrange(500), None, *names, self._value()))

    def _variables(self) -> Any:
        rng = self._rng
        sound: list[tuple[str, Any]] = [("enable_thinking", rng.choice((True, False)))]
        if rng.random() < 0.3:
            sound.append(("add_generation_prompt", rng.choice((True, False))))
        return (
            sound if rng.random() < 0.8 else rng.choice((None, [], 3, [("tokenize", True)], [("chat_template", "x")]))
        )

    def _value(self, depth: int = 0) -> Any:
        """Any JSON; now and then it is deep, large, or no JSON at all."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.25:
            return rng.choice(TEXTS)
        if kind < 0.5:
            return rng.choice(DATA["numbers"])
        if kind < 0.65:
            return rng.choice((None, True, False))
        if kind < 0.75:
            return Verbatim(rng.choice(SPELLED))
        if kind < 0.76:
            return Verbatim(rng.choice(DATA["wrong"]))
        if kind < 0.77:
            levels = rng.choice((3, 398, 399, 400, 401, 5000))
            return Verbatim(rng.choice(("[" * levels + "]" * levels, '{"[":' * levels + "1" + "}" * levels)))
        if kind < 0.773:
            return Verbatim(rng.choice(LARGE))
        if depth > 3:
            return []
        if kind < 0.9:
            return [self._value(depth + 1) for _ in range(rng.randrange(4))]
        return [(rng.choice(TEXTS), self._value(depth + 1)) for _ in range(rng.randrange(1, 4))]

    def _mutate(self, pairs: list[tuple[str, Any]]) -> None:
        rng = self._rng
        at = rng.randrange(len(pairs)) if pairs else 0
        what = rng.randrange(7)
        facts = self._facts
        names = (
            *(facts.prompt_key, facts.messages_key, "prompt_token_ids", facts.id_key, "sampling"),
            *(
                "custom_id",
                "url",
                "body",
                "method",
                "index",
                "choices",
                "error",
                "usage",
                "response",
                "id",
                "topic",
                "input",
            ),
        )
        if what == 0 and pairs:
            del pairs[at]
        elif what == 1 and pairs:
            pairs[at] = rng.choice(names), pairs[at][1]
        elif what == 2 and pairs:
            pairs[at] = pairs[at][0], self._value()
        elif what == 3 and pairs:
            pairs.append((pairs[at][0], self._value()))  # the last of equal keys counts
        elif (
            what == 4
            and pairs
            and isinstance(pairs[at][1], list)
            and pairs[at][1]
            and isinstance(pairs[at][1][0], tuple)
        ):
            self._mutate(pairs[at][1])
        elif what == 5 and pairs and isinstance(pairs[at][1], list):
            items = pairs[at][1]
            if not _is_object(items):
                items.insert(rng.randrange(len(items) + 1), self._value())
        else:
            pairs.insert(at, (rng.choice(names), self._value()))

    def _spell(self, value: Any) -> str:
        """Write JSON with odd spaces and escapes. Lists of pairs are objects."""
        rng = self._rng
        if isinstance(value, Verbatim):
            return value
        if isinstance(value, str):
            return self._spell_text(value)
        if isinstance(value, dict):
            value = [*value.items()]
            if not value:
                return "{}"
        if isinstance(value, list):
            space = rng.choice(("", "", "", " ", "\t"))
            if _is_object(value):
                pairs = (f"{self._spell_text(key)}{space}:{space}{self._spell(inner)}" for key, inner in value)
                return "{" + f"{space},{space}".join(pairs) + space + "}"
            return "[" + f"{space},".join(map(self._spell, value)) + "]"
        return json.dumps(value)

    def _spell_text(self, text: str) -> str:
        rng = self._rng
        if len(text) < 40 and rng.random() < 0.1:
            units = memoryview(text.encode("utf-16-le")).cast("H")
            return '"' + "".join(f"\\u{unit:04x}" for unit in units) + '"'
        return json.dumps(text, ensure_ascii=rng.random() < 0.5)

    def _mutate_bytes(self, line: bytes) -> bytes:
        rng = self._rng
        data = bytearray(line[:2000])
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(data) + 1)
            what = rng.randrange(5)
            if what == 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            elif what == 1:
                data[at:at] = rng.choice(
                    (b"\xff", b"\0", b"\xed\xa0\x80", b'"', b"}", b"\n", b"\\", b"\xc0\xaf", b"\x0b")
                )
            elif what == 2:
                del data[at : at + rng.randrange(1, 9)]
            elif what == 3:
                del data[at:]
            else:
                data[at:at] = data[: rng.randrange(1, 40)]
        return bytes(data)


def _is_object(value: Any) -> bool:
    """Whether a value that was made stands for an object: a list of keys with values."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], tuple)
