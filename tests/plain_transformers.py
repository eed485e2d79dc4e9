"""Models of transformers as they are without flash-linear-attention. Import it before any hybrid model is made.

When a modeling module is imported, transformers takes the kernels of that package if it is installed, whatever device
the model will be on. They cannot run on CPU tensors. A module that another test has imported before is imported anew:
the functions of its classes look kernels up in it.
"""

import sys
from importlib import import_module, reload

HYBRIDS = ("kimi_linear", "qwen3_next", "qwen3_5", "qwen3_5_moe")

_hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "fla"}
sys.modules["fla"] = None  # type: ignore[assignment]
try:
    for _name in HYBRIDS:
        _path = f"transformers.models.{_name}.modeling_{_name}"
        if _path in sys.modules:
            reload(sys.modules[_path])
        else:
            import_module(_path)
finally:
    del sys.modules["fla"]
    sys.modules.update(_hidden)
