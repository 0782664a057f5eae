"""How MindSpore spells ops: primitives by name, what each is called here, and what its positional arguments mean.

One line per op: MindSpore's primitive, the canonical name, and the canonical names of its arguments in the order in
which MindSpore passes them. Before the bar stand those that go on by position; a name that ends in "..." takes a
sequence, however it was given; one that begins with "!" must be false or None, as it is unless asked for. What isn't in
the table has no sharding rule on MindSpore.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ATTRIBUTES", "KEYWORDS", "NAMES", "Spelling"]


class Spelling(NamedTuple):
    """What a primitive means.

    Attributes:
        canonical: name of the op.
        leading: arguments that are passed on by position.
        others: arguments that are passed on by keyword.
        inplace: whether it writes to its first argument.
    """

    canonical: str
    leading: tuple[str, ...]
    others: tuple[str, ...]
    inplace: bool


KEYWORDS = {"axis": "dim", "axes": "dims", "keepdims": "keepdim", "keep_dims": "keepdim", "x": "input", "y": "other"}
"""Keywords of MindSpore's that are called otherwise here."""

ATTRIBUTES = {"Stack": ("axis",), "Sort": ("axis", "descending")}
"""Arguments that older primitives carry as attributes; they count as the last positional ones."""

_TABLE = """
    AddExt              add             input other | alpha
    Add                 add             input other
    AddScalar           add             input other | alpha
    SubExt              sub             input other | alpha
    Sub                 sub             input other
    SubScalar           sub             input other | alpha
    Mul                 mul             input other
    Muls                mul             input other
    Div                 div             input other
    Divs                div             input other
    RealDiv             div             input other
    DivMod              div             input other | rounding_mode
    DivMods             div             input other | rounding_mode
    FloorDiv            floor_divide    input other
    FloorDivScalar      floor_divide    input other
    FloorMod            remainder       input other
    RemainderTensorTensor remainder     input other
    RemainderTensorScalar remainder     input other
    Pow                 pow             input other
    PowTensorScalar     pow             input other
    PowScalarTensor     pow             input other
    Maximum             maximum         input other
    Minimum             minimum         input other
    Atan2Ext            atan2           input other
    Greater             gt              input other
    GreaterScalar       gt              input other
    GreaterEqual        ge              input other
    GreaterEqualScalar  ge              input other
    Less                lt              input other
    LessScalar          lt              input other
    LessEqual           le              input other
    LessEqualScalar     le              input other
    Equal               eq              input other
    EqScalar            eq              input other
    NotEqual            ne              input other
    NeScalar            ne              input other
    LogicalAnd          logical_and     input other
    LogicalOr           logical_or      input other
    LogicalXor          logical_xor     input other
    LogicalNot          logical_not     input
    BitwiseNot          bitwise_not     input
    BitwiseAndTensor    bitwise_and     input other
    BitwiseAndScalar    bitwise_and     input other
    BitwiseOrTensor     bitwise_or      input other
    BitwiseOrScalar     bitwise_or      input other
    Neg                 neg             input
    Abs                 abs             input
    Exp                 exp             input
    Expm1               expm1           input
    Log                 log             input
    Log1p               log1p           input
    Log2                log2            input
    Sqrt                sqrt            input
    Rsqrt               rsqrt           input
    Square              square          input
    Reciprocal          reciprocal      input
    Sin                 sin             input
    Cos                 cos             input
    Tan                 tan             input
    Sinh                sinh            input
    Cosh                cosh            input
    Tanh                tanh            input
    Asin                asin            input
    Acos                acos            input
    Atan                atan            input
    Erf                 erf             input
    Erfc                erfc            input
    Sign                sign            input
    Floor               floor           input
    Ceil                ceil            input
    Round               round           input | decimals
    Trunc               trunc           input
    IsNan               isnan           input
    IsInf               isinf           input
    IsFinite            isfinite        input
    IsClose             isclose         input other | rtol atol equal_nan
    Sigmoid             sigmoid         input
    LogSigmoidExt       logsigmoid      input
    ReLU                relu            input
    ReLU6               relu6           input
    SiLU                silu            input
    GeLU                gelu            input
    GeluExt             gelu            input | approximate
    Softplus            softplus        input
    SoftplusExt         softplus        input | beta threshold
    HSwish              hardswish       input
    HSigmoid            hardsigmoid     input
    Mish                mish            input
    Elu                 elu             input | alpha
    LeakyReLUExt        leaky_relu      input | negative_slope
    ClampScalar         clamp           input | min max
    ClampTensor         clamp           input min max
    Select              where           condition input other
    MaskedFill          masked_fill     input mask value
    MaskedFillScalar    masked_fill     input mask value
    MaskedFills         masked_fill     input mask value
    ToDtype             to              input | dtype
    ToOther             type_as         input dtype
    Cast                to              input | dtype
    ZerosLike           zeros_like      input
    ZerosLikeExt        zeros_like      input | dtype
    OnesLike            ones_like       input
    OnesLikeExt         ones_like       input | dtype
    FullLike            full_like       input | fill_value dtype
    Clone               clone           input
    Contiguous          contiguous      input
    InplaceCopy         copy_           input src

    Dense               linear          input weight bias
    MatMul              matmul          input other | transpose_a transpose_b
    MatMulExt           matmul          input other
    Mm                  mm              input other
    Mv                  mv              input other
    Dot                 dot             input other
    BatchMatMul         bmm             input other | transpose_a transpose_b
    BatchMatMulExt      bmm             input other
    Outer               outer           input vec2
    Addmm               addmm           input batch1 batch2 | beta alpha
    Baddbmm             baddbmm         input batch1 batch2 | beta alpha

    Reshape             reshape         input | shape...
    View                reshape         input | shape...
    FlattenExt          flatten         input | start_dim end_dim
    ExpandDims          unsqueeze       input | dim
    ExpandDimsView      unsqueeze       input | dim
    Squeeze             squeeze         input | dim
    Transpose           permute         input | dims...
    TransposeView       permute         input | dims...
    TransposeExtView    transpose       input | dim0 dim1
    BroadcastTo         broadcast_to    input | size
    BroadcastToView     broadcast_to    input | size
    ExpandAs            expand_as       input other
    Tile                tile            input | dims...
    Repeat              repeat          input | repeats...
    Narrow              narrow          input | dim start length
    NarrowView          narrow          input | dim start length
    SplitTensor         split           input | split_size dim
    SplitTensorView     split           input | split_size dim
    SplitWithSize       split           input | split_size dim
    SplitWithSizeView   split           input | split_size dim
    Chunk               chunk           input | chunks dim
    ChunkView           chunk           input | chunks dim
    UnstackExtView      unbind          input | dim
    Unstack             unbind          input | dim
    Split               chunk           input | dim chunks
    ReverseV2           flip            input | dims
    Concat              cat             tensors | dim
    StackExt            stack           tensors | dim
    Stack               stack           tensors | dim
    Tril                tril            input | diagonal
    TrilExt             tril            input | diagonal
    Triu                triu            input | diagonal
    SelectExtView       select          input | dim index

    Sum                 sum             input | dim keepdim dtype
    SumExt              sum             input | dim keepdim dtype
    DeprecatedSum       sum             input | dim dtype keepdim
    MeanExt             mean            input | dim keepdim dtype
    DeprecatedMean      mean            input | dim keepdim
    ReduceMean          mean            input | dim keepdim
    ReduceSum           sum             input | dim keepdim !skip_mode
    ReduceMax           amax            input | dim keepdim
    ReduceMin           amin            input | dim keepdim
    Max                 max             input
    Min                 min             input
    MaxDim              max             input | dim keepdim
    MinDim              min             input | dim keepdim
    DeprecatedArgmax    argmax          input | dim keepdim
    ArgMaxExt           argmax          input | dim keepdim
    ProdExt             prod            input | dim keepdim dtype
    ReduceProd          prod            input | dim keepdim
    ReduceAll           all             input | dim keepdim
    ReduceAny           any             input | dim keepdim
    Any                 any             input | dim keepdim
    All                 all             input | dim keepdim
    LogSumExp           logsumexp       input | dim keepdim
    CumsumExt           cumsum          input | dim dtype
    CumSum              cumsum          input | dim !exclusive !reverse
    Sort                sort            input | dim descending
    TopK                topk            input | k
    TopkExt             topk            input | k dim largest sorted

    Softmax             softmax         input | dim
    LogSoftmax          log_softmax     input | dim
    LogSoftmaxExt       log_softmax     input | dim dtype
    LayerNormExt        layer_norm      input | normalized_shape weight bias eps

    GatherD             gather          input | dim index
    IndexSelect         index_select    input | dim index
"""


def _read(line: str) -> tuple[str, Spelling]:
    primitive, canonical, *rest = line.split()
    bar = rest.index("|") if "|" in rest else len(rest)
    inplace = canonical.endswith("_")
    return primitive, Spelling(canonical.rstrip("_"), tuple(rest[:bar]), tuple(rest[bar + 1 :]), inplace)


NAMES: dict[str, Spelling] = dict(_read(line) for line in _TABLE.splitlines() if line.strip())
"""By MindSpore's name of the primitive."""
