"""Text that comes in pieces, wrapped at words as it comes. It must never hold back more than one unfinished word."""

from __future__ import annotations

import re
from typing import IO

_WORDS = re.compile(r"\n|[^\S\n]+|\S+")


class Prose:
    """Writes to ``file`` in lines of at most ``width`` characters; a longer word gets a line of its own.

    Line breaks and indents in the text are kept.
    """

    def __init__(self, file: IO[str], width: int) -> None:
        self._file = file
        self._width = width
        self._column = 0
        self._blanks = ""
        self._word = ""
        self.begun = False
        """Something was to be written."""

    def __repr__(self) -> str:
        return f"<Prose at column {self._column} of {self._width}>"

    def write(self, piece: str) -> None:
        """Take in ``piece`` and write all words that are complete."""
        self.begun = True
        for part in _WORDS.findall(piece):
            if not part.isspace():
                self._word += part
                continue
            self._flush_word()
            if part == "\n":
                self._break()
            else:
                self._blanks += part
        self._file.flush()

    def end(self) -> None:
        """Write the last word and end the line."""
        self._flush_word()
        if self._column:
            self._break()
        self._file.flush()

    def interrupt(self) -> None:
        """End the line for something else: the text goes on in one of its own."""
        if self._column:
            self._break()
        self._file.flush()

    def _break(self) -> None:
        self._file.write("\n")
        self._column, self._blanks = 0, ""

    def _flush_word(self) -> None:
        if not self._word:
            return
        if self._column and self._column + len(self._blanks) + len(self._word) > self._width:
            self._break()
        self._file.write(self._blanks + self._word)
        self._column += len(self._blanks) + len(self._word)
        self._blanks = self._word = ""
