"""Horovod's module of this name, from which scripts import its collectives: all that `hvd` has."""

from syncengine.horovod import *  # noqa: F403
