"""Diagnostics: of the warm checkpoint (one capture with real engines, then one rule, CSV and figure per study), and of
finished runs (one rule per run, one table over all).

snakemake diagnose_toy        the step-0 studies of configs/toy.yaml (any experiment: diagnose_NAME); no training
snakemake science_toy         those, the diagnostics of every trained run of the experiment, and the report on top

Figures and tables: results/<experiment>/diagnose-<hash>/<study>.{csv,md,svg,png}, runs in its folder runs/<run id>/.
"""

from quads.diagnostics.names import STUDIES

ARMS = {
    name: config_hash(*load_arms(experiment, Path("configs"), more=True))
    for name, experiment in EXPERIMENTS.items()
}


for name in EXPERIMENTS:

    rule:
        name:
            f"diagnose_{name}"
        input:
            [
                paths.diagnose_dir(EXPERIMENTS[name]) / f"{study}.json"
                for study in STUDIES
            ],

    rule:
        name:
            f"science_{name}"
        input:
            [
                paths.diagnose_dir(EXPERIMENTS[name]) / f"{study}.json"
                for study in (*STUDIES, "trained")
            ],
            targets(name),


rule diagnose_capture:
    input:
        model=model_manifest,
        # The checkpoint already depends on the data's content; here the files only have to be there.
        data=ancient(data_manifest),
    output:
        "results/{experiment}/diagnose-{diagnose}/captures/manifest.json",
    log:
        "results/logs/{experiment}/diagnose-{diagnose}/capture.log",
    benchmark:
        "results/benchmarks/{experiment}/diagnose-{diagnose}/capture.tsv"
    wildcard_constraints:
        diagnose="[0-9a-f]{10}",
    threads: threads_of
    resources:
        mem_mb=memory_mb,
        job_gib=memory_gib,
        cpus_per_task=threads_of,
        gpu=engine_gpus,
        runtime=240,
        slurm_partition=partition,
        slurm_account=account,
    params:
        code=code_hash("quads.diagnostics.capture", "quads.integrations.vllm"),
        arms=lambda wildcards: ARMS[wildcards.experiment],
        experiment=config_file,
        model=lambda wildcards, input: Path(input.model).parent,
        data=lambda wildcards, input: Path(input.data).parent,
        out=folder,
    shell:
        "python -m quads.diagnose capture --experiment {params.experiment} --model {params.model} "
        "--data {params.data} --out {params.out} 2>&1 | tee -a {log}"


for study in STUDIES:

    rule:
        name:
            f"diagnose_{study}_study"
        input:
            captures="results/{experiment}/diagnose-{diagnose}/captures/manifest.json",
            model=ancient(model_manifest),
        output:
            csv=f"results/{{experiment}}/diagnose-{{diagnose}}/{study}.csv",
            markdown=f"results/{{experiment}}/diagnose-{{diagnose}}/{study}.md",
            svg=report(
                f"results/{{experiment}}/diagnose-{{diagnose}}/{study}.svg",
                caption="../report/diagnose.rst",
                category="Diagnostics",
            ),
            png=f"results/{{experiment}}/diagnose-{{diagnose}}/{study}.png",
            done=f"results/{{experiment}}/diagnose-{{diagnose}}/{study}.json",
        log:
            f"results/logs/{{experiment}}/diagnose-{{diagnose}}/{study}.log",
        benchmark:
            f"results/benchmarks/{{experiment}}/diagnose-{{diagnose}}/{study}.tsv"
        wildcard_constraints:
            diagnose="[0-9a-f]{10}",
        threads: threads_of
        resources:
            mem_mb=memory_mb,
            job_gib=memory_gib,
            cpus_per_task=threads_of,
            gpu=engine_gpus,
            runtime=120,
            slurm_partition=partition,
            slurm_account=account,
        params:
            code=code_hash("quads.diagnostics.studies", "quads.diagnostics.write"),
            arms=lambda wildcards: ARMS[wildcards.experiment],
            experiment=config_file,
            study=study,
            model=lambda wildcards, input: Path(input.model).parent,
            captures=lambda wildcards, input: Path(input.captures).parent,
            out=folder,
        shell:
            "python -m quads.diagnose {params.study} --experiment {params.experiment} --model {params.model} "
            "--captures {params.captures} --out {params.out} 2>&1 | tee -a {log}"


rule diagnose_run:
    input:
        train="results/{experiment}/train/{run}/result.json",
        # The training result already depends on the data's content; here the files only have to be there.
        data=ancient(data_manifest),
    output:
        csv="results/{experiment}/diagnose-{diagnose}/runs/{run}/run.csv",
        layers="results/{experiment}/diagnose-{diagnose}/runs/{run}/run_layers.csv",
        done="results/{experiment}/diagnose-{diagnose}/runs/{run}/run.json",
    log:
        "results/logs/{experiment}/diagnose-{diagnose}/runs/{run}.log",
    benchmark:
        "results/benchmarks/{experiment}/diagnose-{diagnose}/runs/{run}.tsv"
    wildcard_constraints:
        diagnose="[0-9a-f]{10}",
    threads: threads_of
    resources:
        mem_mb=memory_mb,
        job_gib=memory_gib,
        cpus_per_task=threads_of,
        gpu=engine_gpus,
        runtime=120,
        slurm_partition=partition,
        slurm_account=account,
    params:
        code=code_hash("quads.diagnostics.trained", "quads.integrations.vllm"),
        experiment=config_file,
        arm=lambda wildcards, output: run_of(wildcards).arm.name,
        seed=lambda wildcards, output: run_of(wildcards).seed,
        data=lambda wildcards, input: Path(input.data).parent,
        train=lambda wildcards, input: Path(input.train).parent,
        out=folder,
    shell:
        "python -m quads.diagnose run --experiment {params.experiment} --arm {params.arm} --seed {params.seed} "
        "--train {params.train} --data {params.data} --out {params.out} 2>&1 | tee -a {log}"


rule diagnose_trained:
    input:
        runs=lambda wildcards: [
            f"results/{wildcards.experiment}/diagnose-{wildcards.diagnose}/runs/{run.id}/run.json"
            for run in runs_of(experiment_of(wildcards))
        ],
        step0="results/{experiment}/diagnose-{diagnose}/decomposition.json",
    output:
        csv="results/{experiment}/diagnose-{diagnose}/trained.csv",
        markdown="results/{experiment}/diagnose-{diagnose}/trained.md",
        layers="results/{experiment}/diagnose-{diagnose}/trained_layers.csv",
        svg=report(
            "results/{experiment}/diagnose-{diagnose}/trained.svg",
            caption="../report/diagnose_trained.rst",
            category="Diagnostics",
        ),
        png="results/{experiment}/diagnose-{diagnose}/trained.png",
        done="results/{experiment}/diagnose-{diagnose}/trained.json",
    log:
        "results/logs/{experiment}/diagnose-{diagnose}/trained.log",
    benchmark:
        "results/benchmarks/{experiment}/diagnose-{diagnose}/trained.tsv"
    wildcard_constraints:
        diagnose="[0-9a-f]{10}",
    resources:
        job_gib=1,
    params:
        code=code_hash("quads.diagnostics.trained", "quads.diagnostics.write"),
        experiment=config_file,
        runs=lambda wildcards, input: [Path(run).parent for run in input.runs],
        step0=lambda wildcards, input: Path(input.step0).parent,
        out=folder,
    shell:
        "python -m quads.diagnose trained --experiment {params.experiment} --runs {params.runs} "
        "--step0 {params.step0} --out {params.out} 2>&1 | tee -a {log}"
