"""The memory plan: what is left for KV, and what is said when it is too little."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.memory_plan import CPU_KV_TOKENS, MemoryPlan, Workspace, plan_blocks
from outrider.errors import DoesNotFit

GIB = 2**30
GPU = MemoryPlan(
    total=80 * GIB,
    usable=72 * GIB,
    taken=62 * GIB,
    weights=61 * GIB,
    workspace=Workspace(activations=GIB, logits=2 * GIB),
    is_cuda=True,
)
CPU = MemoryPlan(total=16 * GIB, usable=8 * GIB, taken=0, weights=GIB, workspace=Workspace(GIB, 2 * GIB), is_cuda=False)
CONFIG = EngineConfig(model="m")


def blocks(
    plan: MemoryPlan, config: EngineConfig = CONFIG, longest: int = 4096, bytes_per_token: int = GIB >> 12
) -> int:
    return plan_blocks(plan, config, block_size=16, bytes_per_token=bytes_per_token, longest=longest)


def test_kv_gets_what_weights_and_a_full_step_leave() -> None:
    """Guards against a pool that is full before the first large step, which then runs out of memory."""
    assert blocks(GPU) * 16 == 7 * 4096
    assert blocks(replace(GPU, workspace=Workspace(GIB, 8 * GIB))) * 16 == 4096
    assert blocks(replace(GPU, workspace=Workspace(GIB, 2 * GIB, graphs=6 * GIB))) * 16 == 4096


def test_on_the_cpu_other_programs_keep_their_share() -> None:
    """Guards the machine: a share of what is available, never more than there is beside a full step."""
    assert blocks(CPU) * 16 == int(0.4 * 8 * 4096) // 16 * 16
    assert blocks(replace(CPU, workspace=Workspace(GIB, 6 * GIB))) * 16 == 4096
    assert blocks(replace(CPU, usable=200 * GIB), bytes_per_token=1024) * 16 == CPU_KV_TOKENS


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    """Guards against a start that fails minutes later, and against a message without a way out."""
    with pytest.raises(DoesNotFit) as caught:
        blocks(replace(GPU, taken=69 * GIB, weights=68 * GIB), EngineConfig(model="m", max_model_len=4096))
    message = str(caught.value)
    for part in ("80.00 GiB in all", "72.00 GiB usable", "68.00 GiB weights", "1.00 GiB taken otherwise"):
        assert part in message
    for part in ("1.00 GiB activations", "2.00 GiB logits", "0.00 GiB left", "max_model_len", "gpu_memory_utilization"):
        assert part in message


@pytest.mark.parametrize(("plan", "tokens"), [(GPU, 7 * 4096 + 1), (CPU, 5 * 4096 + 1)])
def test_a_pool_that_was_asked_for_must_fit_too(plan: MemoryPlan, tokens: int) -> None:
    """Guards against kv_cache_tokens that the device does not have."""
    assert blocks(plan, EngineConfig(model="m", kv_cache_tokens=tokens - 1)) == (tokens - 1) // 16
    with pytest.raises(DoesNotFit, match=f"kv_cache_tokens = {tokens:,}"):
        blocks(plan, EngineConfig(model="m", kv_cache_tokens=tokens))


def test_the_logits_of_a_step_count_all_rows_that_it_can_ask_for() -> None:
    """Guards a plan for one row per stream, where a round of gamma slots asks for gamma + 1."""
    plain = EngineConfig(model="m", max_num_seqs=32)
    rounds = replace(plain, logits_rows=32 * 17)
    sizes = {"vocab_rows": 100_000, "widest": 8192, "itemsize": 2, "copies": 8}
    assert Workspace.of(plain, **sizes).logits == 32 * 100_000 * (6 + 12)
    assert Workspace.of(rounds, **sizes).logits == 32 * 17 * 100_000 * 6 + 12 * 32 * 17 * 100_000
    assert Workspace.of(replace(plain, logits_rows=10**6), **sizes).logits == 2048 * 100_000 * 6 + 12 * (1 << 26)
