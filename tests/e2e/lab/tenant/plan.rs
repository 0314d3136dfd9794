//! The plan of a migration, as `culvert render` prints it.

/// A migration plan.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) steps: Vec<Step>,
}

/// A step of a plan.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) title: String,
    /// Commands of a shell, and comments that tell the operator what to do by hand.
    pub(crate) commands: Vec<String>,
    pub(crate) restarts: String,
    pub(crate) back: String,
}

impl Plan {
    /// Parses the output of `culvert render --diff-from`.
    ///
    /// # Panics
    /// If a line is not part of a plan.
    pub(crate) fn parse(text: &str) -> Self {
        let mut steps: Vec<Step> = Vec::new();
        let mut lines = text.lines();
        let title = lines.next().unwrap_or_default();
        assert!(title.starts_with("From "), "{text}");
        for line in lines.filter(|line| !line.is_empty()) {
            let number = format!("{}. ", steps.len() + 1);
            if let Some(title) = line.strip_prefix(&number) {
                steps.push(Step {
                    title: title.to_owned(),
                    ..Step::default()
                });
            } else if let Some(step) = steps.last_mut() {
                if let Some(command) = line.strip_prefix("     ") {
                    let command = command.strip_suffix("  # KKP only").unwrap_or(command);
                    // The operator stops at a failed command anyway.
                    let command = command.strip_suffix(" &&").unwrap_or(command);
                    step.commands.push(command.to_owned());
                } else if let Some(restarts) = line.strip_prefix("   restarts: ") {
                    restarts.clone_into(&mut step.restarts);
                } else if let Some(back) = line.strip_prefix("   back:     ") {
                    back.clone_into(&mut step.back);
                } else {
                    panic!("not a line of a plan: {line:?}");
                }
            } else {
                assert!(line.starts_with("SEED and USER stand for"), "{line:?}");
            }
        }
        let is_complete = |step: &Step| !step.commands.is_empty() && !step.restarts.is_empty();
        assert!(steps.len() >= 5 && steps.iter().all(is_complete), "{text}");
        Self { steps }
    }
}

impl Step {
    /// Returns true if the plan promises that the step restarts nothing.
    pub(crate) fn restarts_nothing(&self) -> bool {
        self.restarts == "nothing"
    }

    /// Returns true if the step removes what the way back needs. All earlier steps have a way back of their own.
    pub(crate) fn is_final(&self) -> bool {
        self.title.starts_with("Remove ") || self.title == "Take the permission back."
    }
}
