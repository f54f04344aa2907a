"""Network families, one per file. Register a new one here."""

from rayfl.models.base import MODELS
from rayfl.models.base import MODELS_KIND as MODELS_KIND
from rayfl.models.base import ImageModel as ImageModel
from rayfl.models.base import Model as Model
from rayfl.models.cnn import DigitsCNN, HeteroFLCNN, LeNet5Caffe, McMahanCNN
from rayfl.models.gkt import GKTLeNet5, GKTResNet8, GKTResNet55
from rayfl.models.huggingface import GPT2, Bert, CausalLM, DistilBert, Llama, Roberta
from rayfl.models.inferred.module import Module
from rayfl.models.liang import LiangCNN, LiangMLP
from rayfl.models.lora import Lora
from rayfl.models.mix import Mix
from rayfl.models.resnet import (
    DepthFLResNet18,
    PreActResNet18,
    PreActResNet18HeteroFL,
    ResNet8,
    ResNet18,
    ResNet20,
    ResNet32,
    ResNet34,
    ResNet56,
    ResNet110,
    ScaleFLResNet110,
    WideResNet101,
)
from rayfl.models.spafl import SpaFLCNN, SpaFLResNet18
from rayfl.models.transformer import FedRolexTransformer, HeteroFLTransformer
from rayfl.models.variables import LSTM, MLP, Conv1D
from rayfl.models.vit import ViTB16

MODELS |= {
    "digits_cnn": DigitsCNN,
    "mcmahan_cnn": McMahanCNN,
    "lenet5_caffe": LeNet5Caffe,
    "heterofl_cnn": HeteroFLCNN,
    "liang_mlp": LiangMLP,
    "liang_cnn": LiangCNN,
    "preact_resnet18": PreActResNet18,
    "preact_resnet18_heterofl": PreActResNet18HeteroFL,
    "resnet18": ResNet18,
    "resnet34": ResNet34,
    "resnet8": ResNet8,
    "resnet20": ResNet20,
    "resnet32": ResNet32,
    "resnet56": ResNet56,
    "resnet110": ResNet110,
    "wide_resnet101_2": WideResNet101,
    "depthfl_resnet18": DepthFLResNet18,
    "scalefl_resnet110": ScaleFLResNet110,
    "resnet8_gkt": GKTResNet8,
    "resnet55_gkt": GKTResNet55,
    "lenet5_gkt": GKTLeNet5,
    "spafl_cnn": SpaFLCNN,
    "spafl_resnet18": SpaFLResNet18,
    "vit_b_16": ViTB16,
    "module": Module,
    "mlp": MLP,
    "conv1d": Conv1D,
    "lstm": LSTM,
    "roberta": Roberta,
    "bert": Bert,
    "distilbert": DistilBert,
    "gpt2": GPT2,
    "llama": Llama,
    "causal_lm": CausalLM,
    "heterofl_transformer": HeteroFLTransformer,
    "fedrolex_transformer": FedRolexTransformer,
    "lora": Lora,
    "mix": Mix,
}
