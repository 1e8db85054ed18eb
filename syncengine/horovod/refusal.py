"""What Horovod has and this does not, and what takes its place."""

_ADASUM = "use op=hvd.Average or op=hvd.Sum"
_NAMES = "what it has for scripts is in syncengine.horovod itself (hvd.allreduce, ...)"
_GPU = "ask torch.cuda.is_available()"

REFUSED = {
    "Adasum": _ADASUM,
    "num_rank_is_power_2": f"it is for Adasum: {_ADASUM}",
    "run": "start the script with torchrun, mpirun or srun",
    "gpu_available": _GPU,
    "mpi_lib_v2": _NAMES,
    "check_extension": "there is nothing to check: importing syncengine says so if it is not built",
    "check_installed_version": "there is nothing to check: importing syncengine says so if it is not built",
}
