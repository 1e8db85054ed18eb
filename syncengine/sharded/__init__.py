"""``ShardedOptimizer``: one copy of the weights and of the optimizer's state on a host."""

from syncengine.sharded.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
