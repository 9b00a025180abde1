"""The transport of a single process keeps the contract."""

import numpy as np
import pytest
from support.transport_contract import *  # noqa: F403
from support.transport_contract import BACK, FRONT, numbers, transfer_of

from multimesh.errors import StallError
from multimesh.transport import connect


@pytest.fixture
def group():
    return connect()[0]


@pytest.fixture
def transport():
    _, transport = connect()
    yield transport
    transport.close()


def test_take_before_send_names_the_microbatch(transport):
    transfer = transfer_of([numbers((8,), np.float32)], FRONT, BACK, name="F2 -> F3")
    channel = transport.open(transfer, depth=1)
    with pytest.raises(StallError, match="F2 -> F3: microbatch 3 was taken before"):
        channel.take(3)
