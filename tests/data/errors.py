"""What tests of data expect of an error."""

import pytest

from bayou.data import DataError


def refused(message):
    """The error in a sentence that a user sees."""
    return pytest.raises(DataError, match=message)
