"""Draws the picture of docs/inspection.md: where a recurrent model and a captioner look.

python docs/attention_picture.py runs/recurrent runs/captioner docs/images/attention.png
"""

import io
import sys
from dataclasses import replace

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoProcessor, AutoTokenizer

import regard
from regard.training.builtin.glyphs import load_glyphs

recurrent, captioner, output = sys.argv[1:]
SOURCE = "en_US: Tuesday, November 10, 2026"

model = AutoModelForSeq2SeqLM.from_pretrained(f"{recurrent}/model")
date = regard.attention_map(model, AutoTokenizer.from_pretrained(f"{recurrent}/model"), SOURCE)

model = AutoModelForImageTextToText.from_pretrained(f"{captioner}/model")
processor = AutoProcessor.from_pretrained(f"{captioner}/model")
row = next(row for row in load_glyphs("test", size=50) if row["text"].endswith("with macron"))
letter = regard.attention_map(model, processor, image=row["image"])

pictures = []
for attention, title in ((date, "a recurrent model that rewrites dates"), (letter, "a captioner that names letters")):
    buffer = io.BytesIO()
    replace(attention, title=title).figure().savefig(buffer, format="png", dpi=110)
    pictures.append(Image.open(buffer).convert("RGB"))
whole = Image.new("RGB", (max(each.width for each in pictures), sum(each.height for each in pictures) + 20), "white")
top = 0
for picture in pictures:
    whole.paste(picture, (0, top))
    top += picture.height + 20
whole.save(output)
