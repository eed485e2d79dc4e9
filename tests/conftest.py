"""One pool of ranks for the whole session."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from longweave.launch import Ranks

torch.set_num_threads(1)
settings.register_profile("longweave", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("longweave")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks(8) as pool:
        yield pool
