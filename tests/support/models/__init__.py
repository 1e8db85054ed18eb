"""Models of the size and kind that people train, each with its data and optimizer. They run inside rank processes.

What is here but not in parallel_models.py: real layers in real numbers, and whatever makes a kind of model special to a
data-parallel wrapper.
"""

from models.workload import Workload


def workload(name: str) -> Workload:
    """By name, since only names travel to the ranks."""
    from models import experts, gpt, lstm, recommender, resnet

    kinds = {
        "resnet18": resnet.Images,
        "resnet18_channels_last": resnet.ChannelsLastImages,
        "gpt": gpt.Text,
        "recommender": recommender.Clicks,
        "recommender_sparse": recommender.SparseClicks,
        "experts": experts.Routed,
        "lstm": lstm.Sentences,
    }
    return kinds[name]()
