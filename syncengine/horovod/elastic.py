"""Horovod's module of this name: refused, with what to use instead."""

from syncengine.horovod.refusal import refuse

refuse("elastic")
