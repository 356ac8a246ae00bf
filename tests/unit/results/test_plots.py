from pathlib import Path
from typing import Any

import pytest

from testbed.results.plots import save


def test_an_error_in_writing_an_image_keeps_no_view_of_it(tmp_path: Path) -> None:
    """A view would forbid to close the image, and Python 3.13 says so where it happens to collect it."""
    images = []

    class Figure:
        def savefig(self, image: Any, **_: Any) -> None:
            image.write(b"picture")
            images.append(image)

    with pytest.raises(FileNotFoundError) as failed:
        save(Figure(), tmp_path / "absent" / "picture.png")
    images[0].close()
    del failed  # until here it has held the frames
