"""ShardedOptimizer on several hosts: sharded within each, the same on all."""

import itertools
import statistics
from functools import partial

import pytest
import torch
from marks import mostly_nightly
from pool import RankPool
from sharded_training import copies, differences, different_weights, make, plain, train, trained

import syncengine


def on_hosts() -> tuple[list[str], list[torch.Tensor], int]:
    theirs = make()
    ours, model, optimizer = trained(5)
    changed = ours.state_dict()
    changed["head.bias"] = changed["head.bias"] + 1
    ours.load_state_dict(changed)
    reference, plain_optimizer = plain(theirs)
    train(reference, plain_optimizer, 5)
    with torch.no_grad():
        theirs.head.bias.add_(1)
    train(model, optimizer, range(5, 7))
    train(reference, plain_optimizer, range(5, 7))
    wrong = different_weights(ours, theirs) + differences(plain_optimizer.state_dict(), optimizer.state_dict())
    parts = sum(piece.end - piece.begin for piece in optimizer._sharing.blocks[0].shard.pieces)
    syncengine.barrier()
    return wrong, copies(ours), parts


@pytest.mark.thorough
@pytest.mark.parametrize("hosts", mostly_nightly(["ab", "aab", "aabb", "abab"], 1))
def test_hosts_have_the_same_bits_and_share_within(pool: RankPool, hosts: str):
    answers = pool.run(on_hosts, hosts=hosts)
    assert [wrong for wrong, _, _ in answers] == [[]] * len(hosts)
    total = sum(p.numel() for p in make().parameters())
    for host in set(hosts):
        parts = [part for (_, _, part), other in zip(answers, hosts, strict=True) if other == host]
        assert sum(parts) == total  # each host does it all
        assert max(parts) - min(parts) <= 256
    for _, weights, _ in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, answers[0][1], strict=True))


def bytes_between_hosts() -> list[list[int]]:
    """That this rank sends in each of ten steps, plain and sharded."""
    communicator = syncengine.default_communicator()
    sent: list[list[int]] = []
    for kind in (torch.optim.AdamW, partial(syncengine.ShardedOptimizer, optimizer_class=torch.optim.AdamW)):
        model = syncengine.Parallel(make(), bucket_cap_mb=1)  # else timings choose, for each model, what crosses
        optimizer = kind(model.parameters(), lr=1e-2)
        counts = []
        for step in range(20):
            train(model, optimizer, range(step, step + 1))
            communicator.barrier()
            counts.append(communicator.counters()["interhost_bytes"])
        sent.append([b - a for a, b in itertools.pairwise(counts[-11:])])
    return sent


@pytest.mark.thorough
@pytest.mark.parametrize("hosts", mostly_nightly(["ab", "aabb"], 1))
def test_nothing_more_crosses_than_gradients(pool: RankPool, hosts: str):
    """But for a few bytes, in the median step."""
    by_rank = pool.run(bytes_between_hosts, hosts=hosts)
    as_before, as_sharded = (
        statistics.median(sum(step) for step in zip(*(sent[kind] for sent in by_rank), strict=True)) for kind in (0, 1)
    )
    gradients = sum(4 * p.numel() for p in make().parameters())
    assert as_before > gradients
    assert as_sharded < as_before + gradients / 100
