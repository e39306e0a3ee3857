"""NVFP4 checkpoints of trained runs in the formats that other engines load, each with the verifier's report.

snakemake export_toy    every run of the experiment whose rollouts have NVFP4 weights, both formats

results/<experiment>/export/<run>-<format>/ is the checkpoint, results/<experiment>/export/<run>-<format>.json says
what was verified: layout, scales, bits, bit equality with the engine's own weights, log-probs against the trainer.
"""

for name in EXPERIMENTS:

    rule:
        name:
            f"export_{name}"
        input:
            exported(name),


rule export:
    input:
        train=train_result,
    output:
        directory("results/{experiment}/export/{run}-{form}"),
    log:
        "results/logs/{experiment}/export/{run}-{form}.log",
    benchmark:
        "results/benchmarks/{experiment}/export/{run}-{form}.tsv"
    wildcard_constraints:
        form="|".join(FORMATS),
    threads: threads_of
    resources:
        mem_mb=memory_mb,
        job_gib=memory_gib,
        cpus_per_task=threads_of,
        runtime=120,
        slurm_partition=partition,
        slurm_account=account,
    params:
        code=code_hash("quads.exporting.write", "quads.exporting.activations"),
        train=lambda wildcards, input: Path(input.train).parent,
    shell:
        "python -m quads.export --train {params.train} --format {wildcards.form} --out {output} 2>&1 | tee -a {log}"


rule verify_export:
    input:
        train=train_result,
        checkpoint="results/{experiment}/export/{run}-{form}",
    output:
        "results/{experiment}/export/{run}-{form}.json",
    log:
        "results/logs/{experiment}/export/{run}-{form}-verify.log",
    benchmark:
        "results/benchmarks/{experiment}/export/{run}-{form}-verify.tsv"
    wildcard_constraints:
        form="|".join(FORMATS),
    threads: threads_of
    resources:
        mem_mb=memory_mb,
        job_gib=memory_gib,
        cpus_per_task=threads_of,
        runtime=120,
        slurm_partition=partition,
        slurm_account=account,
    params:
        code=code_hash("quads.exporting.verify", "quads.exporting.parity"),
        train=lambda wildcards, input: Path(input.train).parent,
    shell:
        "python -m quads.export verify {input.checkpoint} --against {params.train} --out {output} 2>&1 | tee -a {log}"
