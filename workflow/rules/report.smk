"""Tables and figures of an experiment: `report` for its arms, `report_all` with more_arms."""


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
    output:
        table=report(
            "results/{experiment}/report{all}/table.csv",
            caption="../report/table.rst",
            category="Tables",
        ),
        markdown="results/{experiment}/report{all}/table.md",
        curves="results/{experiment}/report{all}/curves.csv",
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
        out=folder,
    shell:
        "python -m quads.report --experiment {params.experiment} {params.more} --results results "
        "--out {params.out} 2>&1 | tee -a {log}"
