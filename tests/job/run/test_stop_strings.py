"""Stop strings are found wherever they fall, and in the same place however the tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.job.text.stop_strings import StopStringDetector, StopStrings


def decode_bytes(ids: Sequence[int]) -> str:
    """Each id is a byte of UTF-8; ids from 256 on are special tokens without text."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def run(
    ids: Sequence[int], stops: list[str], groups: Sequence[int] = (), min_tokens: int = 0
) -> tuple[str | None, int]:
    detector = StopStringDetector(decode_bytes, StopStrings(stops), min_tokens=min_tokens)
    at = 0
    for size in [*groups, len(ids)]:
        if detector.push(ids[at : at + size]):
            break
        at += size
    return detector.text, detector.num_tokens


@pytest.mark.parametrize(
    ("text", "stops", "expected", "num_tokens"),
    [
        ("one two three", ["two"], "one ", 7),
        ("one two", ["x"], None, 7),
        ("aab", ["ab"], "a", 3),
        ("aaab", ["aab", "ab"], "a", 4),
        ("abcd", ["bcd", "c"], "ab", 3),
        ("stop", ["s"], "", 1),
        ("grüße", ["üß"], "gr", 6),
        ("a😀b", ["😀"], "a", 5),
        ("a😀b", ["b"], "a😀", 6),
        ("x\n\ny", ["\n\n"], "x", 3),
    ],
)
def test_text_ends_before_the_stop_string(text: str, stops: list[str], expected: str | None, num_tokens: int) -> None:
    assert run(list(text.encode()), stops) == (expected, num_tokens)


def test_a_stop_string_that_is_complete_before_min_tokens_is_text() -> None:
    ids = list(b"a.b.c")
    assert run(ids, ["."], min_tokens=2) == ("a", 2)
    assert run(ids, ["."], min_tokens=3) == ("a.b", 4)


def test_a_token_may_end_a_stop_string_and_begin_a_character() -> None:
    texts = [b"ab.\xc3", b"\xbc.", b"c"]

    def decode(ids: Sequence[int]) -> str:
        return b"".join(texts[i] for i in ids).decode(errors="replace")

    for stop, expected in (("b.", ("a", 1)), ("\u00fc.", ("ab.", 2)), (".c", ("ab.\u00fc", 3)), (".\u00fc", ("ab", 2))):
        detector = StopStringDetector(decode, StopStrings([stop]))
        detector.push([0, 1, 2])
        assert (detector.text, detector.num_tokens) == expected


def test_special_tokens_and_broken_bytes_do_not_hide_a_stop_string() -> None:
    assert run([*b"ab", 300, *b"cd"], ["bc"]) == ("a", 4)
    assert run([*b"ab", *([0xFF] * 40), *b"cd"], ["cd"])[0] is not None


@pytest.mark.parametrize("num_broken", range(1, 20))
def test_broken_bytes_do_not_swallow_the_character_behind_them(num_broken: int) -> None:
    """However far they are looked back on, the character may have begun with the last of those tokens."""
    ids = [*b"a", *([0xFF] * num_broken), *"\U0001f600.b".encode()]
    assert run(ids, ["."]) == ("a" + "\ufffd" * num_broken + "\U0001f600", num_broken + 6)


def test_tokens_of_several_characters() -> None:
    vocabulary = ["Hello", " wor", "ld. St", "op", " here"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(vocabulary[i] for i in ids)

    detector = StopStringDetector(decode, StopStrings(["Stop"]))
    assert not detector.push([0, 1])
    assert detector.push([2, 3, 4])
    assert (detector.text, detector.num_tokens) == ("Hello world. ", 4)


def test_a_leading_space_that_the_decoder_drops_at_the_start_is_kept_in_the_middle() -> None:
    def decode(ids: Sequence[int]) -> str:  # as SentencePiece does
        return "".join([" a", " b", " c"][i] for i in ids).removeprefix(" ")

    detector = StopStringDetector(decode, StopStrings(["b c"]))
    assert detector.push([0, 1, 2])
    assert detector.text == "a "


def test_stop_strings_that_begin_alike_and_end_alike() -> None:
    stops = ["abcde", "bcdf", "cd!", "d?"]
    assert run(list(b"abcdf"), stops) == ("a", 5)
    assert run(list(b"abcd!"), stops) == ("ab", 5)
    assert run(list(b"abcd?"), stops) == ("abc", 5)
    assert run(list(b"abcabcde"), stops) == ("abc", 8)


def test_many_long_stop_strings_cost_no_more_than_few() -> None:
    """Each token was looked for in all of them, over as many characters as the longest has."""
    stops = [f"{'a' * 60}{number}" for number in range(1024)]
    assert run([*b"a" * 20_000, *b"1b"], stops) == ("a" * 19_940, 20_001)


@given(
    text=st.text(alphabet="ab. ü😀", max_size=30),
    stops=st.lists(st.text(alphabet="ab. ü😀", min_size=1, max_size=4), min_size=1, max_size=3),
    groups=st.lists(st.integers(1, 6), max_size=12),
    min_tokens=st.integers(0, 5),
)
def test_grouping_does_not_matter_and_the_first_stop_string_wins(
    text: str, stops: list[str], groups: list[int], min_tokens: int
) -> None:
    ids = list(text.encode())
    outcome = run(ids, stops, groups, min_tokens)
    assert outcome == run(ids, stops, [1] * len(ids), min_tokens)
    if min_tokens == 0:
        # The plain definition: the shortest prefix (in whole characters) that holds a stop string.
        prefixes = (text[:end] for end in range(len(text) + 1))
        whole = next((prefix for prefix in prefixes if any(stop in prefix for stop in stops)), None)
        if whole is None:
            assert outcome == (None, len(ids))
        else:
            cut = min(whole.find(stop) for stop in stops if stop in whole)
            assert outcome == (whole[:cut], len(whole.encode()))


@given(
    text=st.text(alphabet="ab. ü😀", max_size=30),
    stops=st.lists(st.text(alphabet="ab. ü😀", min_size=1, max_size=4), max_size=3),
    groups=st.lists(st.integers(1, 6), max_size=12),
    min_tokens=st.integers(0, 5),
)
def test_settled_text_is_never_taken_back(text: str, stops: list[str], groups: list[int], min_tokens: int) -> None:
    """What was given out is how the answer begins, and no more is held back than a stop string may begin with."""
    ids = list(text.encode())
    detector = StopStringDetector(decode_bytes, StopStrings(stops), min_tokens=min_tokens)
    settled = ""
    at = 0
    for size in [*groups, len(ids)]:
        if detector.push(ids[at : at + size]):
            break
        at += size
        settled += detector.take_settled()
        so_far = bytes(ids[:at]).decode(errors="ignore")
        assert so_far.startswith(settled)
        assert len(so_far) - len(settled) <= max(map(len, stops), default=0)
        assert any(stop.startswith(so_far[len(settled) :]) for stop in [*stops, ""])
    assert (text if detector.text is None else detector.text).startswith(settled)
