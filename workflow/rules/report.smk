"""Tables, figures and the page of an experiment: `report` for its arms, `report_all` with more_arms.

Step-0 studies, diagnostics of trained runs, rollout and kernel benchmarks are optional inputs: those that exist are taken
in (and the report is made again when one appears); the others are "not run" in the page. `snakemake science_NAME` makes
the studies first and the report from them.
"""


rule report_arms:
    input:
        train=lambda wildcards: [
            paths.train_dir(experiment_of(wildcards), run) / "result.json"
            for run in runs_of(experiment_of(wildcards), more=wildcards.all == "_all")
        ],
        evaluation=lambda wildcards: [
            paths.eval_dir(experiment_of(wildcards), run) / "result.json"
            for run in runs_of(experiment_of(wildcards), more=wildcards.all == "_all")
        ],
        studies=study_files,
        benches=bench_files,
        kernels=[KERNELS] if KERNELS.exists() else [],
    output:
        table=report(
            "results/{experiment}/report{all}/table.csv",
            caption="../report/table.rst",
            category="Tables",
        ),
        page=report(
            "results/{experiment}/report{all}/index.html",
            caption="../report/page.rst",
            category="Page",
        ),
        claims=report(
            "results/{experiment}/report{all}/tables/claims.csv",
            caption="../report/claims.rst",
            category="Tables",
        ),
        markdown="results/{experiment}/report{all}/table.md",
        curves="results/{experiment}/report{all}/curves.csv",
        sources="results/{experiment}/report{all}/sources.json",
        # not declared, because an experiment may have no benchmarks: benchmarks.csv, tests.csv
        reward=report(
            "results/{experiment}/report{all}/reward.svg",
            caption="../report/reward.rst",
            category="Figures",
        ),
        gap=report(
            "results/{experiment}/report{all}/gap.svg",
            caption="../report/gap.rst",
            category="Figures",
        ),
        accuracy=report(
            "results/{experiment}/report{all}/accuracy.svg",
            caption="../report/accuracy.rst",
            category="Figures",
        ),
        beside=report(
            expand(
                "results/{{experiment}}/report{{all}}/figures/{name}.svg",
                name=["ablation", "table3", "layers", "throughput"],
            ),
            caption="../report/beside.rst",
            category="Beside the paper",
        ),
        reward_png="results/{experiment}/report{all}/reward.png",
        gap_png="results/{experiment}/report{all}/gap.png",
        done="results/{experiment}/report{all}/report.json",
    log:
        "results/logs/{experiment}/report{all}.log",
    benchmark:
        "results/benchmarks/{experiment}/report{all}.tsv"
    wildcard_constraints:
        all="|_all",
    params:
        code=code_hash("quads.report", "quads.paper"),
        evaluation=lambda wildcards: paths.eval_hash(experiment_of(wildcards)),
        title=lambda wildcards: experiment_of(wildcards).title,
        experiment=config_file,
        more=lambda wildcards, output: "--more-arms" if wildcards.all == "_all" else "",
        kernels=lambda wildcards, input: (
            f"--kernels {KERNELS}" if input.get("kernels") else ""
        ),
        out=folder,
    shell:
        "python -m quads.report --experiment {params.experiment} {params.more} --results results {params.kernels} "
        "--out {params.out} 2>&1 | tee -a {log}"
