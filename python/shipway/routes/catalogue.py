"""Every route the project knows, by the name a user types."""

from shipway.routes.route import RouteInfo

ROUTES = {
    info.name: info
    for info in (
        RouteInfo(
            name="torch-eager",
            pole="eager",
            rung="eager",
            factory="shipway.routes.torch_eager:TorchEager",
            devices=("cpu",),
            dtypes=("f32", "bf16"),
            weight_formats=("f32", "bf16"),
            requires=("torch",),
            remedy="pip install torch==2.13.0",
            summary="plain PyTorch module, one launch per op: the baseline",
            own_dtype_only=True,
        ),
        RouteInfo(
            name="mojo-graph",
            pole="whole-language",
            rung="graph",
            factory="shipway.routes.mojo_graph:MojoGraph",
            devices=("cpu",),
            dtypes=("f32", "bf16"),
            weight_formats=("f32", "bf16", "f16"),
            requires=("max", "mojo"),
            remedy="pip install max==26.7.0 mojo==1.2.0",
            ships=True,
            summary="our Mojo kernels composed into one MAX graph",
        ),
        RouteInfo(
            name="torch-compile",
            pole="heuristic",
            rung="graph",
            factory="shipway.routes.torch_compile:TorchCompile",
            devices=("cpu",),
            dtypes=("f32", "bf16"),
            weight_formats=("f32", "bf16"),
            requires=("torch",),
            remedy="pip install torch==2.13.0",
            summary="PyTorch through Inductor: max-autotune, frozen weights",
            own_dtype_only=True,
        ),
        RouteInfo(
            name="xla",
            pole="heuristic",
            rung="graph",
            factory="shipway.routes.xla:Xla",
            devices=("cpu",),
            dtypes=("f32", "bf16"),
            weight_formats=("f32", "bf16"),
            requires=("jax", "jaxlib"),
            remedy="pip install jax==0.10.2 jaxlib==0.10.2",
            summary="the decoder in JAX, compiled by XLA",
            own_dtype_only=True,
        ),
        RouteInfo(
            name="tvm-dlight",
            pole="heuristic",
            rung="graph",
            factory="shipway.routes.tvm_dlight:TvmDlight",
            devices=("cpu",),
            dtypes=("f32", "bf16"),
            weight_formats=("f32", "bf16"),
            requires=("tvm", "tvm_ffi"),
            remedy="pip install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1",
            summary="torch.export into TVM, scheduled by our dlight rules without search",
            own_dtype_only=True,
        ),
    )
}
