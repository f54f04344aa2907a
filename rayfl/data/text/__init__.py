"""Text data sets, one file each, with their readers, tokenizers and token cache."""

from rayfl.data.text.ag_news import AGNews as AGNews
from rayfl.data.text.own import OwnText as OwnText
from rayfl.data.text.shakespeare import Shakespeare as Shakespeare
from rayfl.data.text.sst2 import SST2 as SST2
from rayfl.data.text.wikitext2 import WikiText2 as WikiText2
