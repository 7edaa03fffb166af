"""How Sphinx builds the site: `make docs`. It reads the docstrings of the installed package."""

import forge

project = "forge"
author = "the forge developers"
release = version = forge.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["requirements.txt"]

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # each docstring says what its arguments may be
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Any name in a docstring that leads nowhere is an error. Types of the standard library are not
# linked: the build fetches nothing.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:(class|exc|data)", r"(TypeError|ValueError|MemoryError|RuntimeError|ImportError|object)"),
    (r"py:.*", r"matplotlib\..*"),
]
html_theme = "furo"
html_title = f"forge {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
