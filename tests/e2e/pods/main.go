// The program in the pods of the tests.
//
//	pod                    waits until it is stopped; the pause container of each pod
//	pod get URL            requests the URL, and fails without an answer of 200 within 2 s
//	pod serve CERT KEY     serves a webhook and an aggregated API over TLS on 8443, and byte streams over HTTP on 8080
package main

import (
	"encoding/json"
	"io"
	"log"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Group and version of the aggregated API.
const groupVersion = "greetings.culvert.test/v1"

type object = map[string]any

func main() {
	if len(os.Args) == 1 {
		wait()
		return
	}
	if len(os.Args) == 3 && os.Args[1] == "get" {
		get(os.Args[2])
		return
	}
	if len(os.Args) != 4 || os.Args[1] != "serve" {
		log.Fatalf("unknown arguments %q", os.Args[1:])
	}
	failed := make(chan error)
	go func() { failed <- http.ListenAndServe(":8080", http.HandlerFunc(bytes)) }()
	go func() {
		failed <- http.ListenAndServeTLS(":8443", os.Args[2], os.Args[3], http.HandlerFunc(extension))
	}()
	log.Print("serving")
	log.Fatal(<-failed)
}

func get(url string) {
	client := http.Client{Timeout: 2 * time.Second}
	answer, err := client.Get(url)
	if err != nil {
		log.Fatal(err)
	}
	if answer.StatusCode != http.StatusOK {
		log.Fatal(answer.Status)
	}
}

// Waits for a signal, and collects the exit status of orphans.
func wait() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}

// Answers GET /bytes/N with N bytes: byte i has the value i modulo 251. Answers GET /source with the client's address.
func bytes(answer http.ResponseWriter, request *http.Request) {
	if request.URL.Path == "/source" {
		io.WriteString(answer, request.RemoteAddr)
		return
	}
	text, found := strings.CutPrefix(request.URL.Path, "/bytes/")
	count, err := strconv.ParseInt(text, 10, 64)
	if !found || err != nil {
		http.NotFound(answer, request)
		return
	}
	answer.Header().Set("Content-Length", strconv.FormatInt(count, 10))
	io.Copy(answer, io.LimitReader(&pattern{}, count))
}

type pattern struct{ next byte }

func (p *pattern) Read(into []byte) (int, error) {
	for i := range into {
		into[i] = p.next
		p.next = (p.next + 1) % 251
	}
	return len(into), nil
}

// Serves the webhook and the aggregated API.
func extension(answer http.ResponseWriter, request *http.Request) {
	api := "/apis/" + groupVersion
	switch request.URL.Path {
	case "/validate":
		validate(answer, request)
	case api:
		write(answer, object{
			"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": groupVersion,
			"resources": []object{{
				"name": "greetings", "singularName": "greeting", "namespaced": false,
				"kind": "Greeting", "verbs": []string{"get", "list"},
			}},
		})
	case api + "/greetings":
		write(answer, object{
			"kind": "GreetingList", "apiVersion": groupVersion, "metadata": object{},
			"items": []object{{
				"kind": "Greeting", "apiVersion": groupVersion, "metadata": object{"name": "hello"},
			}},
		})
	default:
		http.NotFound(answer, request)
	}
}

func validate(answer http.ResponseWriter, request *http.Request) {
	var review struct {
		Request struct {
			UID    string
			Object struct{ Data map[string]string }
		}
	}
	if err := json.NewDecoder(request.Body).Decode(&review); err != nil {
		http.Error(answer, err.Error(), http.StatusBadRequest)
		return
	}
	write(answer, object{
		"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
		"response": object{
			"uid":     review.Request.UID,
			"allowed": review.Request.Object.Data["verdict"] != "deny",
			"status":  object{"message": "refused by the far side"},
		},
	})
}

func write(answer http.ResponseWriter, value object) {
	answer.Header().Set("Content-Type", "application/json")
	json.NewEncoder(answer).Encode(value)
}
