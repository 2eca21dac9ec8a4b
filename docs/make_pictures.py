"""Write the README's pictures: each is the output of a tagged cell of an executed notebook, so page and notebook never differ.

    python docs/make_pictures.py

After a notebook has been executed again, run this and look at the picture before you commit it.
"""

import base64
import json
from pathlib import Path

__all__ = ["PICTURES", "main", "picture_of"]

ROOT = Path(__file__).resolve().parents[1]
# file in docs/ -> (notebook, tag of the cell)
PICTURES = {"ring_on_real_gradients.png": ("03_ring_all_reduce", "picture-for-readme")}


def picture_of(notebook: Path, tag: str) -> bytes:
    """The PNG that the one cell with `tag` shows. Raises ValueError where there is no such cell, or it shows no picture."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    tagged = [cell for cell in cells if tag in cell["metadata"].get("tags", [])]
    found = [o["data"]["image/png"] for cell in tagged for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    if len(found) != 1:
        raise ValueError(f"{notebook.name}: {len(found)} pictures in cells tagged {tag!r}, it needs exactly 1; execute it")
    return base64.b64decode("".join(found[0]))


def main() -> None:
    """Write every picture of PICTURES."""
    for name, (notebook, tag) in PICTURES.items():
        data = picture_of(ROOT / "notebooks" / f"{notebook}.ipynb", tag)
        (ROOT / "docs" / name).write_bytes(data)
        print(f"docs/{name}: {len(data):,} bytes, from {notebook}, cell {tag}")


if __name__ == "__main__":
    main()
