"""Compressed checkpoints in Hugging Face transformers: ``from_pretrained`` decodes while it loads.

To try it, with the directory of a model whose ``*.safetensors`` files are compressed::

    from transformers import AutoModelForCausalLM
    from tightwire.adapters.weights.hugging_face import TightwireConfig

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=TightwireConfig())

Importing this module registers the quantization method "tightwire" with transformers, so that a
``config.json`` with ``"quantization_config": {"quant_method": "tightwire"}`` needs no argument. The
result is an ordinary model, nothing in it is quantized, and ``save_pretrained`` writes plain files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tightwire.contents import naming
from tightwire.lazy import File, open_file

_NEEDS = f"{__name__} needs transformers>=5.21"

try:
    from transformers import __version__
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.integrations.accelerate import get_device
    from transformers.quantizers import (
        HfQuantizer,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(f"{_NEEDS}: {error}") from error
if not hasattr(HfQuantizer, "get_new_dtype"):
    raise ImportError(f"{_NEEDS}, found {__version__}")

METHOD = "tightwire"


@register_quantization_config(METHOD)
@dataclass
class TightwireConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Tells ``from_pretrained`` that the files are compressed by tightwire. It has no settings.

    Args:
        quant_method: ``"tightwire"``, as ``config.json`` has it.

    Raises:
        ValueError: For another method.
    """

    quant_method: str = METHOD

    #: After loading, transformers takes this config off the model.
    dequantize = True

    def __post_init__(self) -> None:
        if self.quant_method != METHOD:
            raise ValueError(f"quant_method is {self.quant_method!r}; allowed: {METHOD!r}")


class _DecodingConverter(WeightConverter):  # type: ignore[misc]
    """A converter of transformers whose tensors tightwire reads.

    Its operations, and errors of theirs, are those of `original`, which it stands in for while the
    model is loaded.
    """

    def __init__(
        self,
        source_patterns: str | list[str],
        target_patterns: str | list[str],
        operations: Sequence[ConversionOps],
        original: WeightConverter | None = None,
    ) -> None:
        # force_cpu: transformers leaves the compressed bytes on the host.
        super().__init__(source_patterns, target_patterns, list(operations), force_cpu=True)
        self.original = original
        #: From a tensor's name in the files and a parameter's name to the tensor.
        self.read: Callable[[str, str], torch.Tensor] | None = None

    def add_tensor(
        self, target_key: str, source_key: str, source_pattern: str, future: object
    ) -> None:
        # `future` is a view of the file's bytes that transformers has made. `read` is called when
        # the parameter's turn comes, one tensor at a time, where errors reach the caller; what
        # operations raise becomes text in a report.
        assert self.read is not None
        load = partial(self.read, source_key, target_key)
        super().add_tensor(target_key, source_key, source_pattern, load)


class _Keep(ConversionOps):  # type: ignore[misc]
    """Gives its only tensor the name of the parameter."""

    def convert(
        self, input_dict: dict[str, list[torch.Tensor]], *, full_layer_name: str, **_: Any
    ) -> dict[str, list[torch.Tensor]]:
        (tensors,) = input_dict.values()
        return {full_layer_name: tensors}


@register_quantizer(METHOD)
class TightwireQuantizer(HfQuantizer):  # type: ignore[misc]
    """The loader that transformers calls for compressed files; tightwire decodes every tensor.

    Args:
        quantization_config: The configuration.
        **kwargs: Passed on to transformers' ``HfQuantizer``.

    Raises:
        FormatError: While loading, if a file is damaged or not compressed.
        ValueError: For arguments of ``from_pretrained`` that are not supported.
    """

    def __init__(self, quantization_config: TightwireConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # Also where the config is an argument: transformers must not quantize anything.
        self.pre_quantized = True
        self._device_map: Any = None
        #: The open files, by the names of their tensors. None of a state_dict, or after loading.
        self._files: dict[str, File] = {}
        self._conversions: list[Any] = []

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Check and keep the device map; transformers calls it again after resolving "auto".

        Args:
            *args: Not used.
            device_map: The device map.
            **kwargs: Not used.

        Raises:
            ValueError: If the map offloads to disk.
        """
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("device_map offloads to disk; allowed: devices and 'cpu'")
        self._device_map = device_map

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Refuse the dtype of compressed bytes, which "auto" finds if config.json has none.

        Args:
            dtype: The dtype that transformers has chosen.

        Raises:
            ValueError: If config.json names no dtype and none was passed.
        """
        if not dtype.is_floating_point:
            raise ValueError(
                "config.json names no dtype, and that of compressed files is not known before they "
                "are loaded: pass dtype=, for example dtype=torch.bfloat16"
            )
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        if checkpoint_files and getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(
                "distributed loading (tp_plan, distributed_config) reads slices of files, which "
                "compressed ones do not have: load them by tightwire.load and pass state_dict="
            )
        for path in checkpoint_files or ():
            with naming(str(path)):
                file = open_file(path)
            self._files |= dict.fromkeys(file, file)
        return model

    def update_weight_conversions(self, weight_conversions: Sequence[Any], model: Any) -> list[Any]:
        """Add decoding to each of the model's converters, and a converter for every other tensor.

        Args:
            weight_conversions: The model's converters.
            model: The model.

        Raises:
            ValueError: For distributed loading, which reads slices of files.
        """
        if not self._files:
            return list(weight_conversions)
        found = [_decoding(c) if isinstance(c, WeightConverter) else c for c in weight_conversions]
        self._conversions = [*found, _DecodingConverter("^(.+)$", r"\1", [_Keep()])]
        return self._conversions

    def get_new_dtype(
        self, converter: Any, param: Any, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """None, since compressed bytes must not be cast; prepares the converter for its parameter.

        Args:
            converter: The converter of the tensor.
            param: The parameter.
            dtype: The dtype to load as.

        Raises:
            ValueError: If transformers loads a tensor by an old name, without the decoder.
        """
        if not self._files:
            return dtype
        if not isinstance(converter, _DecodingConverter):
            raise ValueError(
                f"transformers loads a tensor by its old name, without the decoder ({converter}): "
                "load the files by tightwire.load and pass state_dict="
            )
        converter.read = partial(self._read, dtype)
        return None

    def _read(self, dtype: torch.dtype | None, source_key: str, target_key: str) -> torch.Tensor:
        device = torch.device(get_device(self._device_map or {"": "cpu"}, target_key))
        like = torch.empty(0, device=device)
        file = self._files[source_key]
        with naming(file.name):
            return file[source_key].load(like).to(dtype=dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Put the model's own converters back, which `save_pretrained` reverts, and close files."""
        used = getattr(model, "_weight_conversions", None)
        if used is None and self._conversions:
            # From transformers 5.24 on a model that is dequantized has none left.
            used = [c for c in self._conversions if c.was_used()]
        if used is not None:
            model._weight_conversions = _originals(used)
        self._conversions[:] = _originals(self._conversions)
        for file in set(self._files.values()):
            file.close()
        self._files.clear()
        return model

    def is_serializable(self) -> bool:
        """True: the loaded model holds ordinary tensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: the loaded model holds ordinary tensors."""
        return True


def _decoding(converter: WeightConverter) -> _DecodingConverter:
    decoding = _DecodingConverter(
        converter._original_source_patterns,
        converter._original_target_patterns,
        converter.operations,
        original=converter,
    )
    decoding.scope_prefix = converter.scope_prefix
    decoding.base_model_prefix = converter.base_model_prefix
    return decoding


def _originals(conversions: Sequence[Any]) -> list[Any]:
    found = [getattr(c, "original", c) for c in conversions]
    return [c for c in found if c is not None]


__all__ = ["TightwireConfig", "TightwireQuantizer"]
