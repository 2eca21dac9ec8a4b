"""Execute notebooks and write them back as they are committed: light pictures, least metadata, counts from 1.

    python docs/execute_notebooks.py notebooks/03_ring_all_reduce.ipynb        (all of notebooks/ when none is named)

Edit a notebook as text with jupytext, then run this, then look at it. It runs as under nbval, with no live widgets, so that a
reader without a kernel sees what a strict comparison will see.
"""

import base64
import io
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

__all__ = ["execute", "main", "shrink"]

ROOT = Path(__file__).resolve().parents[1]
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
COLOURS = 256
LARGEST = 300_000  # bytes of a committed notebook


def shrink(png: str) -> str:
    """The same picture (base64 PNG) in 256 colours: a third of the bytes, no difference to the eye."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    small = base64.b64encode(out.getvalue()).decode()
    return small if len(small) < len(png) else png


def execute(path: Path) -> int:
    """Run all cells and write the notebook back; gives back its size in bytes. Raises CellExecutionError where a cell fails."""
    notebook = nbformat.read(path, 4)
    os.environ["FOURWALLS_WIDGETS"] = "0"
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True, resources=where
    ).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"c{number:03d}"
        cell.metadata = nbformat.from_dict({"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {})
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = shrink(output.data["image/png"])
    notebook.metadata = nbformat.from_dict(METADATA)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
    return path.stat().st_size


def main(names: list[str]) -> None:
    """Execute the notebooks named, or all."""
    for path in [Path(n).resolve() for n in names] or sorted((ROOT / "notebooks").glob("*.ipynb")):
        size = execute(path)
        print(f"{path.name}: {size:,} bytes{' (too large)' if size > LARGEST else ''}")


if __name__ == "__main__":
    main(sys.argv[1:])
