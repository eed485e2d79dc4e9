"""One pool of ranks for the whole session."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from longweave.launch import Ranks

torch.set_num_threads(1)
settings.register_profile("longweave", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("longweave")


EXAMPLES = ("hf_loop", "hf_trainer", "own_decoder", "pooled_encoder", "rl_shared_prompt", "trl_sft")

# Left to `make test-all`, so that `make test` stays short: something quicker shows the same in every run.
SLOW = (
    "tests/fuzz/test_soak.py::test_faults_and_resumes",
    "tests/fuzz/test_same_bits.py::test_a_difference_would_be_seen",
    "tests/fuzz/test_same_bits.py::test_the_same_bits_again_and_after_a_restart",
    "tests/gpu/test_fake_cuda.py::TestModels::test_layers_upload_nothing_and_nobody_waits[17-gpt_oss]",
    "tests/gpu/test_fla_interpreter.py::test_cut_documents[case1-3-dtype1-cu1-layout1]",
    "tests/gpu/test_fla_interpreter.py::test_in_training",
    "tests/gpu/test_fla_interpreter.py::test_stages[gla]",
    "tests/gpu/test_fla_interpreter.py::test_stages_in_16_bits[gla]",
    "tests/gpu/test_flash_masks.py::test_random_tasks",
    "tests/models/test_parallelize.py::test_compiled_layers_serve_every_pack[qwen3_5-24]",
    "tests/models/test_tour.py::test_it_runs_and_shows_what_is_stored",
    "tests/test_compile.py::test_by_inductor",
    "tests/test_doctor.py::test_ranks_that_torchrun_started",
    "tests/test_endings.py::test_it_ends_and_leaves_nothing[train-15]",
    "tests/train/test_train.py::test_torchrun_on_two_hosts",
    "tests/train/test_train_faults.py::test_of_the_command",
    "tests/train/test_train_faults.py::test_the_rank_is_named_in_time[raise-exchange-4]",
    "tests/train/test_train_faults.py::test_torchrun_restarts_and_resumes[kill-backward]",
    "tests/train/test_two_hosts.py::test_they_train_as_two_local_ranks",
    "tests/trainers/test_examples.py::test_trainers[trl_sft]",
    "tests/trainers/test_trainers.py::test_trainers_see_data_parallelism[grpo-3-how12-options12]",
    "tests/trainers/test_trainers.py::test_trainers_see_data_parallelism[sft-4-how7-options7]",
    "tests/trainers/test_trainers.py::test_trainers_see_data_parallelism[trainer-4-how2-options2]",
    *(f"tests/trainers/test_examples.py::test_under_torchrun[{name}]" for name in EXAMPLES),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are named on the command line run always."""
    if os.environ.get("LONGWEAVE_FULL") or any("::" in name for name in config.args):
        return
    slow = [item for item in items if item.nodeid in SLOW]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item.nodeid not in SLOW]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks(8) as pool:
        yield pool
