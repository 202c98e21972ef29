//! Values that are one of a few words.

/// Makes an enum of words: written and read as its word, and described as an enum of them.
macro_rules! words {
    ($(#[doc = $about:literal])+ $Name:ident { $(#[doc = $doc:literal] $Word:ident = $word:literal,)+ }) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub enum $Name {
            $(#[doc = $doc] #[serde(rename = $word)] $Word,)+
        }

        impl $Name {
            /// All values, in order.
            pub const ALL: &[$Name] = &[$($Name::$Word),+];

            /// Returns the word.
            pub const fn name(self) -> &'static str {
                match self {
                    $($Name::$Word => $word,)+
                }
            }

            /// Returns the value that is written so.
            pub fn of_name(name: &str) -> Option<$Name> {
                $Name::ALL.iter().copied().find(|word| word.name() == name)
            }
        }

        impl std::fmt::Display for $Name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl schemars::JsonSchema for $Name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($Name).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                let about = [$($about.trim()),+].join(" ");
                let each = [$(concat!("\n", $word, ":", $doc)),+].concat();
                schemars::json_schema!({
                    "type": "string",
                    "enum": [$($word),+],
                    // Some words are not names in a programming language.
                    "x-enum-varnames": [$(stringify!($Word)),+],
                    "description": format!("{about}\n{each}"),
                })
            }
        }
    };
}
