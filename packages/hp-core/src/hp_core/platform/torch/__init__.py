"""PyTorch behind the platform protocol; the only place of hp-core, with its siblings here, that imports torch."""

from hp_core.platform.torch.platform import TorchPlatform, create_platform

__all__ = ["TorchPlatform", "create_platform"]
