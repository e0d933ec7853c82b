-- pass@k, best@k and majority@k of the same samples, each with its interval, over the questions with at least k samples.
-- :k = null
-- :phase = "eval"
-- :step = null
-- plot: x=k y=pass_at_k+best_at_k+majority_at_k log=x title="Of k samples" y_label="share of questions"

-- Kinds of questions, from which `rlvr analyze at_k` computes the three; without $k for 1, 2, 4, ... and the largest number
-- of samples of a question. `rewards` are those of the samples with the highest mean log-probability, the 2nd highest, ...; tied
-- samples all have their mean. `wrong` are the votes for each wrong answer; samples without an answer abstain. `answered`: whether any has one.
WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
), samples AS (
    SELECT
        run_id, rollouts.step, example_id,
        coalesce(reward, 0) AS reward,
        coalesce(reward > 0.5 AND NOT isnan(reward), false) AS correct,
        nullif(trim(extracted_answer), '') AS answer,
        CASE WHEN NOT isnan(mean_logprob) THEN mean_logprob END AS logprob
    FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
), tied AS (
    SELECT
        run_id, step, example_id, logprob,
        repeat([avg(reward)], count(*)) AS rewards,
        count(*) FILTER (correct) AS correct,
        bool_or(answer IS NOT NULL) AS answered
    FROM samples
    GROUP BY run_id, step, example_id, logprob
), ranked AS (
    SELECT
        run_id, step, example_id,
        sum(correct)::BIGINT AS correct,
        flatten(list(rewards ORDER BY logprob DESC)) AS rewards,
        bool_or(logprob IS NULL) AS unscored,
        bool_or(answered) AS answered
    FROM tied
    GROUP BY run_id, step, example_id
), votes AS (
    SELECT run_id, example_id, coalesce(list(votes ORDER BY votes) FILTER (answer IS NOT NULL), []) AS wrong,
        coalesce(sum(votes) FILTER (answer IS NULL), 0)::BIGINT AS abstained
    FROM (
        SELECT run_id, example_id, answer, count(*) AS votes FROM samples WHERE NOT correct GROUP BY run_id, example_id, answer
    )
    GROUP BY run_id, example_id
)
SELECT
    run_id, step, len(rewards) AS n, correct, rewards, unscored, answered,
    coalesce(wrong, []) AS wrong, coalesce(abstained, 0) AS abstained, count(*) AS questions
FROM ranked LEFT JOIN votes USING (run_id, example_id)
GROUP BY ALL
ORDER BY run_id, step, n, correct, rewards, unscored, answered, wrong, abstained;
