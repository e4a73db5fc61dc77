# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.distributed.afd_transfer.afd_connector.base import (
    AFDConnectorBase,
    AFDLayout,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.afd import AFDConfig, AFDRole

logger = init_logger(__name__)


class AFDConnectorFactory:
    _registry: dict[str, Callable[[], type[AFDConnectorBase]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a connector with a lazy-loading module and class name."""
        if name in cls._registry:
            raise ValueError(f"AFD connector '{name}' is already registered.")

        def loader() -> type[AFDConnectorBase]:
            module = importlib.import_module(module_path)
            return getattr(module, class_name)

        cls._registry[name] = loader

    @classmethod
    def create_connector(
        cls,
        vllm_config: "VllmConfig",
        role: "AFDRole",
        layout: AFDLayout,
        peer: str,
    ) -> AFDConnectorBase:
        if vllm_config.afd_config is None:
            raise ValueError("afd_config must be set to create an AFD connector")
        connector_cls = cls.get_connector_class(vllm_config.afd_config)
        logger.debug("Creating AFD connector %s to %s", connector_cls.__name__, peer)
        return connector_cls(vllm_config, role, layout, peer)

    @classmethod
    def get_connector_class(cls, afd_config: "AFDConfig") -> type[AFDConnectorBase]:
        """Get the connector class that `afd_config` names.

        `afd_connector_module_path`, if set, is where it comes from, even if a
        registered connector has the same name.

        Raises:
            ValueError: There is no such connector; names the field.

        """
        name = afd_config.afd_connector
        module_path = afd_config.afd_connector_module_path
        if module_path is None:
            if name not in cls._registry:
                raise ValueError(
                    f"afd_connector '{name}' is not registered. Registered: "
                    f"{', '.join(sorted(cls._registry))}. For a connector outside "
                    "vLLM, set afd_connector_module_path."
                )
            return cls._registry[name]()

        try:
            module = importlib.import_module(module_path)
        except (ImportError, TypeError, ValueError) as e:
            raise ValueError(
                f"afd_connector_module_path '{module_path}' cannot be imported: {e}"
            ) from e
        connector_cls = getattr(module, name, None)
        if connector_cls is None:
            raise ValueError(
                f"afd_connector_module_path '{module_path}' has no connector '{name}'"
            )
        if not (
            isinstance(connector_cls, type)
            and issubclass(connector_cls, AFDConnectorBase)
        ):
            raise ValueError(
                f"afd_connector '{name}' of '{module_path}' must be a subclass of "
                f"AFDConnectorBase, not {connector_cls!r}"
            )
        return connector_cls


# Register the connectors here and not in their files, so that only the file of
# the one in use is loaded.
