"""Models of Hugging Face's transformers, narrowed by their own configuration; README.md describes how to add one."""

from rayfl.models.huggingface.base import HuggingFace as HuggingFace
from rayfl.models.huggingface.causal import CausalLM as CausalLM
from rayfl.models.huggingface.decoders import GPT2 as GPT2
from rayfl.models.huggingface.decoders import Llama as Llama
from rayfl.models.huggingface.encoders import Bert as Bert
from rayfl.models.huggingface.encoders import DistilBert as DistilBert
from rayfl.models.huggingface.encoders import Encoder as Encoder
from rayfl.models.huggingface.encoders import Roberta as Roberta
