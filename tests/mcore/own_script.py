"""A user's own training script for Megatron, with its own model provider, batches and loss, and without the plug-in."""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, pretrain, print_rank_0
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args


def add_arguments(parser):
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--mean-loss", action="store_true", help="report the mean alone, in Megatron's older way")
    parser.add_argument("--no-labels", action="store_true", help="ask the model for logits")
    parser.add_argument("--freeze-vocabulary", action="store_true", help="train the layers between alone")
    parser.add_argument("--own-evaluation", action="store_true", help="call the model beside Megatron's evaluation")
    return parser


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    print_rank_0("building the user's model")
    model = GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
    if args.freeze_vocabulary and pre_process:
        model.embedding.word_embeddings.requires_grad_(False)
    if args.freeze_vocabulary and post_process:
        model.output_layer.requires_grad_(False)
    return model


class Counting(torch.utils.data.Dataset):
    """Sample i counts upwards from i."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        args = get_args()
        text = (index + args.stride * torch.arange(args.seq_length + 1)) % args.vocab_size
        return {"text": text}


def datasets_provider(samples, vp_stage=None):
    return [Counting(max(count, 1)) for count in samples]


datasets_provider.is_distributed = True


def loss_func(loss_mask, output):
    losses = output.float() * loss_mask
    tokens = loss_mask.sum().to(torch.int)
    total = losses.sum()
    if get_args().mean_loss:
        mean = total / tokens
        return mean, {"lm loss": mean.detach().clone()}
    return total, tokens, {"lm loss": torch.cat([total.detach().clone().view(1), tokens.view(1)])}


def forward_step(data_iterator, model):
    if not (mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()):
        return model(None, None, None, labels=None), partial(loss_func, None)
    text = next(data_iterator)["text"].cuda()
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    position_ids = torch.arange(tokens.shape[1]).expand_as(tokens)
    loss_mask = torch.ones(labels.shape)
    loss_mask[:, ::3] = 0
    labels = None if get_args().no_labels else labels
    return model(tokens, position_ids, None, labels=labels), partial(loss_func, loss_mask)


if __name__ == "__main__":
    parsed = parse_and_validate_args(extra_args_provider=add_arguments)
    pretrain(
        pretrain_cfg_container_from_args(parsed),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=model_provider,
        non_loss_data_func=(lambda chunks: chunks[0](None, None, None)) if parsed.own_evaluation else None,
    )
