"""Ways in which a data set can be refused; each has its own class, so that callers and tests can tell them apart.

    DataError
      NotAvailableError     no network and no copy here       PinError            the hub has no such repository/file
      RowCountError         not as many rows as pinned        ChangedHashError    other bytes or other rows than pinned
      DuplicateError        an id or a problem occurs twice   StaleError          fetched under another pin
      RowError              one row is unusable:
        SchemaError, ControlCharacterError, AnswerError, EmptyTestsError, UnsafePickleError, GoldError

A test set refuses as a whole on a RowError; a training set drops the row and lists it with `reason`.
"""

from __future__ import annotations


class DataError(ValueError):
    """A data set cannot be used; the message says what, got, expected and what to do."""


class NotAvailableError(DataError):
    """Neither the hub nor a local copy can be read."""


class PinError(DataError):
    """The hub answers that the pinned repository, revision or file does not exist or is closed."""


class RowCountError(DataError):
    """Another number of rows than the pin says."""


class ChangedHashError(DataError):
    """A file or the normalised rows differ from what was pinned or recorded."""


class DuplicateError(DataError):
    """Two rows share an id or a text."""

    reason = "duplicate"


class StaleError(DataError):
    """A fetched copy belongs to another pin than the one in force."""


class RowError(DataError):
    """One row is unusable."""

    reason = "row"


class SchemaError(RowError):
    """A field is missing or has another type than the set's schema says."""

    reason = "schema"


class ControlCharacterError(RowError):
    r"""Text holds characters that LaTeX read through wrong escapes leaves behind: \frac as form feed + rac."""

    reason = "control_character"


class AnswerError(RowError):
    """The answer does not have the form of its answer type."""

    reason = "answer"


class EmptyTestsError(RowError):
    """A programming problem without tests, which every program would pass."""

    reason = "no_tests"


class UnsafePickleError(RowError):
    """A payload asks for more than text: a class, a call, an object."""

    reason = "unsafe_pickle"


class GoldError(RowError):
    """The grader cannot grade against this row's answer or tests."""

    reason = "gold"
