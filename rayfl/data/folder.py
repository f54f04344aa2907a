"""Image files with one folder per class."""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rayfl.config import ConfigError
from rayfl.data.arrays import Arrays, Split
from rayfl.data.images import LARGEST, Images
from rayfl.data.own import OwnImages, Stored, with_test

ENDINGS = tuple(
    f".{one}" for one in "avif bmp gif j2k jfif jp2 jpe jpeg jpg pbm pgm png pnm ppm tga tif tiff webp".split()
)
"""Suffixes of image files; other files are left out, which is noted."""
SHADE = 255
"""Background of transparent images: white."""
NAMED = 5
"""Maximum number of files listed in an error."""


class Folder(OwnImages):
    """root/train/<class>/*.png and root/test/<class>/*.png, or root/<class>/*.png with a held-out test set.

    Classes and images are in the order of their names, as sorted by Python. Images are turned as their EXIF data say,
    and transparent parts become white. Other files than images are left out, which is noted.
    """

    name: Literal["folder"] = "folder"
    root: str
    """Folder of the data set. A relative path starts at the working folder."""
    size: int | None = Field(default=None, ge=1, le=LARGEST)
    """Height and width of loaded images: the shorter side is resized to it, and the centre is cropped. Optional if all
    images have one size."""
    channels: Literal[1, 3] = 3
    """1: gray. 3: red, green, blue."""
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Fraction of every class, rounded, that becomes the test set if there is no test/; drawn with a fixed seed."""

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(folder.name for folder in _folders(self._parts()[0]))

    @property
    def classes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Channels, height and width of one image. Without `size` those of the first image."""
        if self.size is not None:
            return self.channels, self.size, self.size
        from PIL import Image

        file = _files(_folders(self._parts()[0])[0])[0]
        try:
            with Image.open(file) as image:
                return self.channels, *size_of(image)
        except Exception as error:
            raise _broken({file: error}) from None

    @property
    def dtype(self) -> Stored:
        return "uint8"

    @property
    def prepare(self) -> Images:
        # images are resized when they are loaded
        return replace(super().prepare, size=None)

    @property
    def offers(self) -> Mapping[str, Any]:
        return {**super().offers, "class_names": self.class_names}

    def load(self) -> Arrays:
        train, *test = self._parts()
        names, shape = self.class_names, self.shape
        samples = self._split(train, names, shape)
        if test:
            return Arrays(samples, self._split(test[0], names, shape))
        return with_test(samples, self.goal, self.test_fraction)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(filter(None, map(_left_out, self._parts())))

    def _parts(self) -> list[Path]:
        """Return the folders of the training set and, if there is one, of the test set. Each contains class folders."""
        root = Path(self.root).expanduser()
        if not root.is_dir():
            raise ConfigError(f"data.root: the folder {self.root!r} does not exist. Allowed: an existing folder")
        there = [part for part in ("train", "test") if (root / part).is_dir()]
        if len(there) == 1:
            raise ConfigError(
                f"data.root: the folder {self.root!r} has only {there[0]}/. Allowed: train/ and test/, or neither"
            )
        parts = [root / part for part in there] or [root]
        for part in parts:
            if not _folders(part):
                raise ConfigError(f"data.root: {part} has no folders. Allowed: one folder per class")
        return parts

    def _split(self, part: Path, names: tuple[str, ...], shape: tuple[int, int, int]) -> Split:
        folders = _folders(part)
        if unknown := [folder.name for folder in folders if folder.name not in names]:
            raise ConfigError(
                f"data.root: {part} has the class {unknown[0]!r}. Allowed: the classes of train/: {', '.join(names)}"
            )
        files, y = [], []
        for folder in folders:
            found = _files(folder)
            files += found
            y += [names.index(folder.name)] * len(found)
        x = np.empty((len(files), *shape), np.uint8)

        def read(i: int) -> Exception | None:
            try:
                x[i] = _pixels(files[i], shape, self.size)
            except Exception as error:
                return error

        with ThreadPoolExecutor() as pool:
            errors = dict(zip(files, pool.map(read, range(len(files))), strict=True))
        if broken := {file: error for file, error in errors.items() if error is not None}:
            raise _broken(broken)
        return {"x": x, "y": np.array(y)}


class _Unfit(Exception):
    """An image with a wrong format or size."""


def _pixels(file: Path, shape: tuple[int, int, int], size: int | None) -> np.ndarray:
    """[C, H, W] uint8."""
    from PIL import Image

    with Image.open(file) as image:
        return pixels_of(image, shape, size)


def pixels_of(image: Any, shape: tuple[int, int, int], size: int | None) -> np.ndarray:
    """Return a PIL image as [C, H, W] uint8: turned as its EXIF data say, transparent parts white, resized to `size` if
    given. Raise an error if it has another size."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    if image.mode.startswith(("I", "F")):
        raise _Unfit("it has more than 8 bits per channel")
    # photos in the format MPO have a preview as second frame
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
        raise _Unfit(f"it has {image.n_frames} frames, not one")
    ImageOps.exif_transpose(image, in_place=True)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (SHADE,) * 4), image)
    image = image.convert("L" if channels == 1 else "RGB")
    if size is not None:
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    elif image.size != (width, height):
        raise _Unfit(f"it has {image.height} x {image.width} pixels, not {height} x {width}")
    return np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)


def size_of(image: Any) -> tuple[int, int]:
    """Return the height and width of a PIL image, turned as its EXIF data say."""
    from PIL import ImageOps

    width, height = ImageOps.exif_transpose(image).size
    return height, width


def _folders(part: Path) -> list[Path]:
    return sorted(folder for folder in part.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _files(folder: Path) -> list[Path]:
    """Return the images of a class. Raise ConfigError if there are none."""
    found = sorted(file for file in folder.iterdir() if _is_image(file))
    if not found:
        endings = ", ".join(ENDINGS)
        raise ConfigError(f"data.root: {folder} has no images. Allowed: one or more files that end in {endings}")
    return found


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in ENDINGS and not file.name.startswith(".")


def _left_out(part: Path) -> str | None:
    """Return a note on what the class folders contain beside images."""
    others = [one for folder in _folders(part) for one in folder.iterdir() if not _is_image(one)]
    kinds = Counter("folders" if one.is_dir() else one.suffix or "no ending" for one in others if one.name[0] != ".")
    if not kinds:
        return None
    each = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"data.root: in the class folders of {part}, these are left out, because they are no images: {each}"


def _broken(broken: Mapping[Path, Exception]) -> ConfigError:
    named = [f"\n  {file}: {str(error) or type(error).__name__}" for file, error in broken.items()]
    more = [f"\n  and {len(broken) - NAMED} more"] if len(broken) > NAMED else []
    return ConfigError(
        f"data.root: {len(broken)} images cannot be used. Allowed: none. Hint: repair or remove them, or set "
        "data.size if their sizes differ:" + "".join(named[:NAMED] + more)
    )
