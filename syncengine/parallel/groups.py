"""Finds the communicator of a model's ranks, from the user's arguments, and the group that tools expect to read."""

from typing import Any

import torch
import torch.distributed as dist

from syncengine._C import Communicator
from syncengine.communicator import default_communicator, group_communicator, init, is_initialized, is_replaced
from syncengine.errors import InvalidUsage
from syncengine.groups import backend_communicator, existing_communicator
from syncengine.torch_group import default_group

Group = Communicator | dist.ProcessGroup


def resolve_group(process_group: Group | None, device_mesh: Any) -> tuple[Communicator, Group]:
    """Returns the communicator, and the value of the wrapper's attribute ``process_group``.

    The attribute is a torch process group wherever there is one, since tools call
    ``dist.get_rank(model.process_group)``. All ranks call this function: a communicator that has failed is replaced,
    and so is one whose process group was replaced.
    """
    if device_mesh is not None:
        if process_group is not None:
            raise InvalidUsage("Cannot specify both process_group and device_mesh arguments.")
        if not isinstance(device_mesh, dist.DeviceMesh):
            raise InvalidUsage(f"device_mesh of type {type(device_mesh).__name__} is no torch DeviceMesh")
        if device_mesh.ndim != 1:
            raise InvalidUsage(f"Only 1D device mesh is supported, but got {device_mesh}: pass device_mesh['dp'], say")
        process_group = device_mesh.get_group(mesh_dim=0)
    if isinstance(process_group, Communicator):
        return process_group, process_group
    if process_group is not None:
        return group_communicator(process_group), process_group
    if (group := default_group()) is not None:
        anew = not is_initialized() or is_replaced()
        if anew and backend_communicator(group) is not None:
            return group_communicator(group), group
        if not anew and dist.get_world_size() != default_communicator().size:
            return group_communicator(group), group
    return with_group(init())


def is_torchs_default(communicator: Communicator) -> bool | None:
    """Whether the communicator is torch's default group's (True) or that of ``init()`` (False); None if neither."""
    if is_initialized() and communicator is default_communicator():
        return False
    group = default_group()
    return True if group is not None and communicator is existing_communicator(group) else None


def resolve_copy(of_torchs_default: bool) -> tuple[Communicator, Group]:
    """Finds the communicator and group for a copy of a model. ``of_torchs_default``: see ``is_torchs_default``.

    Does not communicate if the communicator exists already, even one that has failed, since one rank alone may copy.
    """
    group = default_group()
    if group is not None and (of_torchs_default or not is_initialized()):
        communicator = existing_communicator(group)
        return resolve_group(group, None) if communicator is None else (communicator, group)
    return with_group(default_communicator() if is_initialized() else init())


def check_group(process_group: Any) -> None:
    """Raises ``InvalidUsage`` for anything else than a group of ranks."""
    if process_group is None or isinstance(process_group, Group):
        return
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidUsage("this rank is not in process_group: wrap the module on the group's ranks only")
    raise InvalidUsage(
        f"process_group of type {type(process_group).__name__} is no group of ranks: pass a torch process group, a "
        "syncengine.Communicator, or None for all ranks"
    )


def localize_parameters(module: torch.nn.Module, device_mesh: dist.DeviceMesh) -> None:
    """Replaces DTensors among the parameters by their local shards, as DDP does, if the mesh is part of a larger one.

    Such DTensors may come from tensor parallelism. Each shard is averaged with the same shard of the other replicas.
    """
    if device_mesh._get_root_mesh() != device_mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)


def with_group(communicator: Communicator) -> tuple[Communicator, Group]:
    """The communicator, with torch's default group if that has the same ranks in the same order, else with itself."""
    group = default_group()
    if group is not None and (dist.get_rank(), dist.get_world_size()) == (communicator.rank, communicator.size):
        return communicator, group
    return communicator, communicator
