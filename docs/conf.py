"""How the documentation is built: `make docs`."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "trio-offload"
author = "the trio-offload contributors"
copyright = author
release = importlib.metadata.version(project)
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "directives", "scenario_tables"]
exclude_patterns = ["_build", "_ext"]
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["pictures.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["lmcache", "sglang"]  # of the adapters in offload.engines: they are not installed here
napoleon_google_docstring = True
napoleon_numpy_docstring = False
