"""Words of a private language, and the field's words for them: one list for code and pages."""

from __future__ import annotations

import re
from typing import NamedTuple


class Forbidden(NamedTuple):
    """A pattern that matches no word of ordinary use, and what to write instead."""

    pattern: re.Pattern[str]
    instead: str


def _of(pattern: str, instead: str) -> Forbidden:
    return Forbidden(re.compile(pattern, re.IGNORECASE), instead)


FORBIDDEN = (
    _of(r"\brooms?\b", "memory, storage, buffer, layout or space: what it is"),
    _of(r"(?<!graphics )(?<!model )\bcards?\b", "chunk descriptor"),
    _of(
        r"(?<!\bin )\bturn(?:s|ed|ing)?\b(?! (?:(?:it|them|this) )?(?:on|off|out|into)\b)",
        "one word for each meaning: round, rotate, transpose, offset, convert",
    ),
    _of(r"(?<![-_])\bshots?\b", "one-shot, two-shot (reduce-scatter and all-gather)"),
    _of(r"\bcells?\b", "payload element (sums), bucket (sketch), in-network reduction"),
    _of(r"\blanes?\b", "pipeline, column or thread"),
    _of(r"\bbeside (?:its?|them|this|that|one another)\b", "next to it, with it, at the same time"),
    _of(r"\bwhat (?:came|comes)\b(?! (?:after|back|before|first|next|out))", "what was received"),
    _of(r"\bon (?:its|their) way\b", "pending, in flight"),
    _of(
        r"\b(?:that|it|which|who|what) (?:is|are) (?-i:none)\b(?! of)",
        "invalid x; Unknown parameter 'x'. Allowed: ...",
    ),
    _of(
        r"(?<!\bthere )\b(?:is|are) no (?!longer|more|less|fewer|better|worse|larger|smaller|"
        r"slower|faster|different|substitute)(?=[a-z`])",
        "is not a; Expected an array, got list",
    ),
    _of(r"\bstrangers?\b", "do not publish: the bytes are uninitialised"),
    _of(
        r"\bwhole or not at all\b|\b(?:file|name) is always whole\b",
        "atomically: the old file or the new one",
    ),
    _of(r"\beverything but\b|\ball but\b", "everything except; better two sentences"),
    _of(r"\b(?:or|and) but (?:in|for|with|by|of)\b|\bbut for\b", "except, unless"),
    _of(r"\bwhat \w+(?: \w+)? (?:is|are) (?:made|said) of\b", "name the thing"),
    _of(r"\bmended\b", "fixed; history belongs to the changelog"),
    _of(r"\bgive their shares?\b", "reduce into"),
    _of(r"\bis given no\b(?! more)", "when none is passed"),
    _of(r"\bon paper\b", "simulated, predicted"),
    _of(r"\bthe switch\b", "path selection"),
)

#: Code in prose: reST and Markdown spans.
_CODE = re.compile(r"``[^`]+``|`[^`\n]+`")
#: What stands for it, so that "`x` is no array" still is found.
_PLACEHOLDER = "Code"


def forbidden_words(text: str) -> list[str]:
    """What `text`, prose with code in backticks, has of the list: phrase, and the word instead.

    Code blocks are the caller's to leave out.
    """
    prose = " ".join(_CODE.sub(_PLACEHOLDER, text).split())
    return [
        f"{match.group()!r} in '...{prose[max(match.start() - 30, 0) : match.end() + 30]}...': "
        f"write {word.instead}"
        for word in FORBIDDEN
        for match in word.pattern.finditer(prose)
    ]
