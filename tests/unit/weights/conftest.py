"""A replica in this process, closed after the test."""

from collections.abc import Iterator

import pytest

from quartet.testing.push import LocalReplica


@pytest.fixture
def replica() -> Iterator[LocalReplica]:
    made = LocalReplica()
    yield made
    made.inbox.close()
